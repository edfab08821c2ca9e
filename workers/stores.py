"""torch's key-value stores, by which the processes of a group find each other, on one address of a machine only."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed

dist: Any = torch.distributed  # whose stores have no types


def listening_store(address: str, port: int, timeout: timedelta, size: int | None = None) -> Any:
    """One that others connect to; port 0 is a free one, told by its `port`. `size`: how many they will be. Left to
    itself torch would listen on every address of the machine, and asks nobody who it is. Raises OSError where the
    address or port is not to be had."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def store_at(address: str, port: int, timeout: timedelta, size: int | None = None) -> Any:
    """A connection to such a one. Raises RuntimeError where nobody listens in time."""
    return dist.TCPStore(address, port, size, is_master=False, timeout=timeout)
