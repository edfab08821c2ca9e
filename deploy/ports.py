"""Ports: the one to listen on, and those of others, looked at before anything is started."""

from __future__ import annotations

import errno
import socket

from deploy.errors import CommandError


def check_port(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises CommandError where it cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except socket.gaierror:
        raise CommandError(f"--host: {host} is no address of this machine", 2) from None
    except PermissionError:
        raise CommandError(f"not allowed to listen on port {port}; choose one above 1023 with --port") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(
                f"port {port} on {host} is taken; stop what uses it, or choose another: --port"
            ) from None
        raise CommandError(f"cannot listen on {host} port {port}: {error.strerror or error}", 2) from None


def check_answers(address: str, timeout_s: float = 3) -> None:
    """Raises CommandError where `address` is a host:port at which nothing accepts a connection: a client library may
    take minutes to say so. Anything else that is no host:port is left to the library."""
    host, colon, port = address.rpartition(":")
    if not colon or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, OverflowError):
        raise CommandError(f"nothing answers at {address}; is the Ray cluster running?") from None
