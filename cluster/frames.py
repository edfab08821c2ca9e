"""Messages of bytes over a stream socket: each is its length, four bytes with the highest first, and then its bytes."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from struct import Struct
from typing import cast

from cluster.short_paths import short_directory

LENGTH = Struct("!I")
LARGEST = 1 << 30
"""Bytes that a message may have: what claims to be longer is no message of ours."""
_LONGEST = 60
"""Of a path, that leaves room for the names below it."""


class FrameProtocol(asyncio.Protocol):
    """One end, on an event loop. `heard` gets each message; `lost`, once, that there will be no more, and why."""

    def __init__(self, heard: Callable[[bytes], None], lost: Callable[[Exception | None], None]) -> None:
        self._heard = heard
        self._lost = lost
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self.connected = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # of a stream
        self.connected.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (message := self._next()) is not None:
            self._heard(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost(exc)

    def send(self, message: bytes) -> None:
        """Raises ConnectionError where the other end is gone."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the connection is closed")
        self._transport.write(LENGTH.pack(len(message)) + message)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> bytes | None:
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > LARGEST:
            self.close()
            return None
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        message = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return message


@asynccontextmanager
async def listening(end: FrameProtocol) -> AsyncGenerator[str]:
    """A path at which one other process of this user can connect to `end`, meanwhile. Raises OSError."""
    with tempfile.TemporaryDirectory(
        prefix="stallfree-", dir=short_directory(_LONGEST)
    ) as directory:  # nobody else may enter it
        path = Path(directory) / "socket"
        server = await asyncio.get_running_loop().create_unix_server(lambda: end, path)
        try:
            yield str(path)
        finally:
            server.close()


class FrameSocket:
    """The other end, in a thread that has nothing else to do than to wait for messages."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._incoming = connected.makefile("rb")

    @classmethod
    def connect(cls, path: str) -> FrameSocket:
        """To a Unix socket. Raises OSError."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.connect(path)
        except OSError:
            connected.close()
            raise
        return cls(connected)

    def receive(self) -> bytes | None:
        """The next message; None where the other end has closed, in the middle of one or not. Raises OSError."""
        head = self._incoming.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        message = self._incoming.read(length)
        return message if len(message) == length else None

    def send(self, message: bytes) -> None:
        """Raises OSError."""
        self._socket.sendall(LENGTH.pack(len(message)) + message)

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()
