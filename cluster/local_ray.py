"""A Ray to run on: the one this process has, an existing one by address, or a quiet local one of its own."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker

_constants: Any = ray_constants
_worker: Any = ray_worker
_log = logging.getLogger(__name__)


def prepare_environment() -> None:
    """Before a Ray of our own is started: its workers are no less important than what else runs on the machine. Ray's
    default gives every other process precedence over them, whose streams then stand still. And no record is kept of
    every call, which nobody reads: an iteration is several calls, and Ray's GCS would grow by 200 MiB an hour. Nor are
    the handlers timed, and Serve looks after its replicas twice a second and not ten times: on a machine that computes
    on the processors that all this runs on, it is a thirtieth of one. What the operator has set stays."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    os.environ.setdefault("RAY_event_stats", "0")
    os.environ.setdefault("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5")


@contextmanager
def on_loopback() -> Iterator[None]:
    """A Ray that is started meanwhile is for this machine: it listens on loopback addresses only. What makes Ray do so
    is a switch that is there for other systems' firewalls; its processes inherit it, and this one has read it."""
    name = _constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    given, enabled = os.environ.get(name), _constants.ENABLE_RAY_CLUSTER
    os.environ[name], _constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        _constants.ENABLE_RAY_CLUSTER = enabled
        os.environ.pop(name)
        if given is not None:
            os.environ[name] = given


def _note(data: dict[str, Any], **_: Any) -> None:
    """Instead of Ray's `print_to_stdstream`."""
    _log.debug("%s: %s", data.get("pid"), " ".join(data.get("lines", ())))


def start_ray(**options: Any) -> None:
    """A quiet one of this process's own, for this machine. `options`: more of `ray.init`'s.

    What Ray prints on a driver's standard output where a worker dies, `log_to_driver` or not, is only logged: who waits
    for that worker is told by an exception, and who reads the output may expect JSON there.
    """
    prepare_environment()
    _worker.print_to_stdstream = _note
    with on_loopback():
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **options)


def connect_ray(address: str | None) -> bool:
    """True where this call connected the process, so that the caller is to shut Ray down.

    Raises ConnectionError where nothing answers at the address.
    """
    if ray.is_initialized():
        return False
    if address is None:
        start_ray()
    else:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    return True
