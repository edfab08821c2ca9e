"""A Ray to run on: the one this process has, an existing one by address, or a quiet local one of its own."""

from __future__ import annotations

import logging
import os

import ray


def prepare_environment() -> None:
    """Before a Ray of our own is started: its workers are no less important than what else runs on the machine. Ray's
    default gives every other process precedence over them, whose streams then stand still."""
    os.environ.setdefault("RAY_worker_niceness", "0")


def connect_ray(address: str | None) -> bool:
    """True where this call connected the process, so that the caller is to shut Ray down.

    Raises ConnectionError where nothing answers at the address.
    """
    if ray.is_initialized():
        return False
    if address is None:
        prepare_environment()
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    return True
