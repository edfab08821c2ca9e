"""HAProxy in front of the replicas: what Ray writes for it, bounded; and a real server behind it, met by clients of all
kinds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions

from deploy.balancer import HEAD_BYTES, _write_pages, bounded, find_haproxy, use_haproxy
from deploy.ports import check_port
from deploy.running import Address
from tests.deploy.test_cli import Server, descendants, temporary
from tests.deploy.test_hostile import connect, head, open_all
from tests.deploy.wire import error_of, events, finishes

__all__ = ["temporary"]  # the fixture

NAME = "tiny"
REPLICA_PORTS = range(30_000, 31_001)
"""Of their HTTP servers, Ray's default."""
HELLO: dict[str, Any] = {"model": NAME, "prompt": "Hello", "temperature": 0, "ignore_eos": True}


@pytest.fixture
def written(tmp_path: Path) -> str:
    return as_ray_writes(tmp_path, "127.0.0.1")


def as_ray_writes(tmp_path: Path, host: str, port: int = 8123, applications: int = 1) -> str:
    """For one application, or none yet, on that address."""
    replica = ServerConfig(name="replica", host="127.0.0.1", port=30000)
    backend = BackendConfig(name="http-app", path_prefix="/", app_name="app", servers=[replica])
    options = HTTPOptions(host=host, port=port)
    api = HAProxyApi(
        HAProxyConfig(http_options=options, socket_path=str(tmp_path / "s"), has_received_routes=True, is_head=True),
        {"http-app": backend} if applications else {},
        str(tmp_path / "c"),
    )
    api._generate_config_file_internal()
    return (tmp_path / "c").read_text()


def test_no_haproxy_where_no_file_may_be_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /tmp is mounted on some machines: Serve's own proxy does without."""
    assert find_haproxy("127.0.0.1", tmp_path) is not None
    monkeypatch.setattr(os, "statvfs", lambda directory: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert find_haproxy("127.0.0.1", tmp_path) is None


def test_what_ray_writes_is_bounded_and_haproxy_takes_it(written: str, tmp_path: Path) -> None:
    _write_pages(tmp_path)
    lines = list(bounded(written, tmp_path))
    binds = [line.split()[1:] for line in lines if line.split()[:1] == ["bind"]]
    assert binds == [["127.0.0.1:8123", "tcp-ut", "60s"]], "and no port of statistics, which would be open to all"
    assert [line.split()[4] for line in lines if "stats socket" in line] == ["600"]
    assert not [line for line in lines if line.split()[:1] == ["log"]]
    assert "    option http-ignore-probes" in lines, "no 408 waits for who asks late"
    (tmp_path / "c").write_text("\n".join([*lines, ""]))
    binary = find_haproxy("127.0.0.1", tmp_path)
    assert binary is not None
    checked = subprocess.run([binary, "-c", "-f", str(tmp_path / "c")], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert list(bounded("\n".join(lines), tmp_path)).count("    option clitcpka") == 2, "Ray writes it anew each time"


@pytest.mark.parametrize(
    ("host", "found_at"),
    [
        ("127.0.0.1", "127.0.0.1:30000"),
        ("localhost", "127.0.0.1:30000"),
        ("0.0.0.0", "127.0.0.1:30000"),
        ("192.0.2.7", "192.0.2.7:30000"),
        ("::1", "::1:30000"),
    ],
)
def test_replicas_are_looked_for_where_they_listen(tmp_path: Path, host: str, found_at: str) -> None:
    """They listen on the address that the server was told; Ray has HAProxy look for all of its machine on loopback."""
    written = as_ray_writes(tmp_path, host)
    assert [line.split()[2] for line in bounded(written, tmp_path) if line.split()[:1] == ["server"]] == [found_at]


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8"), ("::", "http://[::1]:8"), ("::1", "http://[::1]:8"), ("h", "http://h:8")],
)
def test_where_a_client_of_this_machine_finds_a_server(host: str, url: str) -> None:
    assert Address(host, 8).url == url


def test_who_is_gone_without_a_word_is_noticed(written: str, tmp_path: Path) -> None:
    """Also while there is nothing to be sent: HAProxy asks the other side, sooner than the system would by itself."""
    lines = [line.split() for line in bounded(written, tmp_path)]
    often = {name: seconds for name, *rest in filter(None, lines) for seconds in rest if name.startswith("clitcpka-")}
    assert often == {"clitcpka-idle": "15s", "clitcpka-intvl": "15s", "clitcpka-cnt": "3"}


def test_a_configuration_that_is_not_known_is_not_served(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="http_frontend"):
        list(bounded("global\ndefaults\nfrontend another\n    bind *:8000\n", tmp_path))


def test_nobody_is_told_that_there_is_no_such_path_while_there_is_no_application(tmp_path: Path) -> None:
    """As after HAProxy was started anew: 503 is tried again, 404 is not."""
    port = check_port("127.0.0.1", 0)
    as_ray_writes(tmp_path, "127.0.0.1", port, applications=0)
    binary = find_haproxy("127.0.0.1", tmp_path)
    assert binary is not None
    use_haproxy(binary, tmp_path, 1)()
    with started(tmp_path / "haproxy", "-db", "-f", tmp_path / "c"):
        until_answered(port)
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False)
    error_of(answer, 503)
    assert answer.headers["retry-after"] == "1"


@contextmanager
def started(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def until_answered(port: int) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with suppress(httpx.HTTPError):
            assert httpx.get(f"http://127.0.0.1:{port}/-/routes", trust_env=False).status_code == 200
            return
        time.sleep(0.05)
    raise AssertionError("nobody answers")


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path) -> Iterator[tuple[Server, str]]:
    arguments = "--json", "--port", "0", "--profile-seconds", "0", "--policy", "chunked", "--replicas", "2"
    with Server(
        "--model", str(tiny_model_dir), "--served-model-name", NAME, "--max-model-len", "2048", *arguments
    ) as running:
        yield running, running.ready()["url"]


@pytest_asyncio.fixture
async def client(server: tuple[Server, str]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server[1], timeout=60, trust_env=False) as connected:
        yield connected


async def running(client: httpx.AsyncClient) -> int:
    lines = (await client.get("/metrics")).text.splitlines()
    (found,) = [line.split()[1] for line in lines if line.startswith("stallfree_requests_running")]
    return int(float(found))


async def until_running(client: httpx.AsyncClient, count: int) -> None:
    while await running(client) != count:  # noqa: ASYNC110 - there is nothing else to ask
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 60 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"Name: value\r\n" * (HEAD_BYTES // 12),
    ],
    ids=["TLS", "no colon", "no length", "a long head"],
)
async def test_what_is_no_request_is_refused(
    server: tuple[Server, str], client: httpx.AsyncClient, sent: bytes
) -> None:
    loop, answer = asyncio.get_running_loop(), b""
    async with open_all([broken := await connect(server[1])]):
        await loop.sock_sendall(broken, sent)
        while part := await loop.sock_recv(broken, 65536):
            answer += part
    assert answer.split()[1] == b"400", answer
    assert (await client.get("/health")).status_code == 200


async def test_a_head_of_some_kilobytes_is_none_of_them(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models", headers={"X-Filler": "a" * (HEAD_BYTES // 2)})
    assert answer.status_code == 200


async def test_who_hangs_up_is_no_longer_served(server: tuple[Server, str], client: httpx.AsyncClient) -> None:
    body = json.dumps({**HELLO, "stream": True, "max_tokens": 1900}).encode()
    async with open_all([gone := await connect(server[1])]):
        await asyncio.get_running_loop().sock_sendall(gone, head(len(body)) + body)
        await until_running(client, 1)
    await until_running(client, 0)


async def test_tokens_come_one_by_one(client: httpx.AsyncClient) -> None:
    """And not in the pieces that a buffer holds."""
    pieces = 0
    async with client.stream("POST", "/v1/completions", json={**HELLO, "stream": True, "max_tokens": 32}) as response:
        async for _ in response.aiter_raw():
            pieces += 1
    assert pieces > 16


async def until_each_serves(client: httpx.AsyncClient, replicas: list[int]) -> None:
    """HAProxy keeps the connections to replicas that it has asked something; one that it takes to be down it asks
    nothing."""

    def asked(pid: int) -> bool:
        found = psutil.Process(pid).net_connections()
        return any(c.status == psutil.CONN_ESTABLISHED and c.laddr.port in REPLICA_PORTS for c in found)

    while not all(map(asked, replicas)):
        assert (await client.get("/health")).status_code == 200


async def test_a_replica_that_dies_takes_its_own_connections_only(
    server: tuple[Server, str], client: httpx.AsyncClient
) -> None:
    """Requests that come while there is one replica less are served, and so are those that come later. One that had
    reached the replica when it died has its connection closed, and is tried again as OpenAI's client does."""

    async def read() -> list[str]:
        text = ""
        try:
            async with client.stream("POST", "/v1/completions", json={**HELLO, "stream": True, "max_tokens": 300}) as r:
                async for piece in r.aiter_text():
                    text += piece
        except httpx.HTTPError:
            return ["lost"]
        return list(map(str, finishes(events(text))))

    replicas = [pid for pid, command in descendants(server[0].mark).items() if ":Api" in command and "Serve" in command]
    assert len(replicas) == 2
    await until_each_serves(client, replicas)
    streams = [asyncio.create_task(read()) for _ in range(6)]
    await until_running(client, 6)
    os.kill(replicas[0], signal.SIGKILL)
    later, closed = [], 0
    async with httpx.AsyncClient(base_url=server[1], timeout=60, trust_env=False) as another:
        while len(later) < 10:
            try:
                later.append((await another.post("/v1/completions", json={**HELLO, "max_tokens": 4})).status_code)
            except httpx.RemoteProtocolError:
                closed += 1
    assert closed <= 2
    assert later.count(200) >= 9, later
    assert set(later) <= {200, 502}, later
    ended = await asyncio.gather(*streams)
    assert all(each in (["length"], ["lost"]) for each in ended), ended
    assert 0 < ended.count(["lost"]) < 6, ended


async def test_bad_input_is_told_by_the_api(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={**HELLO, "max_tokens": -1})
    assert error_of(answer, 400)["param"] == "max_tokens"
