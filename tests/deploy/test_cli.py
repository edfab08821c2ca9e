"""The command line as a user meets it: help at once, one line for what is wrong, and a server that leaves nothing."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster.config import EngineConfig
from cluster.precedence import NICENESS
from deploy import cli
from deploy.running import APPLICATION, last_words, loading
from workers.tokenizer import TokenizerError


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str, code: int) -> str:
    """The one line that the command says before it ends with this exit code."""
    assert cli.run(list(arguments)) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("stallfree: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--chunk-size", "0"], ["--chunk-size", "greater than or equal to 1"]),
        (["serve", "--prefix-caching", "perhaps"], ["--prefix-caching", "perhaps"]),
        (["serve", "--prefix-caching", "true", "--no-prefix-caching"], ["--no-prefix-caching", "choose one"]),
        (["serve", "--chunk-size", "many"], ["--chunk-size", "integer"]),
        (["serve", "--policy", "fastest"], ["--policy", "chunked", "fastest"]),
        (["serve", "--kv-memory", "lots"], ["--kv-memory", "2GiB"]),
        (["serve", "--kv-memory", "9" * 40 + "GiB"], ["--kv-memory", "less than"]),
        (["serve", "--kv-memory", "1GiB", "--num-blocks", "5"], ["--kv-memory", "--num-blocks", "choose one"]),
        (["serve", "--device", "cpu", "--port", "0", "--kv-memory", "1KiB"], ["--kv-memory", "720.0 KiB"]),
        (["serve", "--device", "cpu", "--port", "0", "--num-blocks", "99999999999"], ["--num-blocks", "is free"]),
        (
            ["serve", "--device", "cpu", "--port", "0", "--block-size", "100000000"],
            ["block of 100000000 tokens", "--kv-memory", "--block-size"],
        ),
        (["serve", "--port", "0", "--max-model-len", "100000000"], ["--max-model-len 100000000", "8192 positions"]),
        (["serve", "--device", "cpu", "--port", "0", "--attention", "flash_attn"], ["--attention flash_attn", "cpu"]),
        (["serve", "--port", "0", "--iteration-log", "/no/such/folder/x"], ["--iteration-log", "/no/such/folder"]),
        (["serve", "--port", "0", "--iteration-log", "/"], ["--iteration-log", "is a folder"]),
        (["serve", "--slo-classes", "a=1, a=2"], ["--slo-classes", "'a'", "twice"]),
        (["serve", "--slo-classes", "a=1:2:3:4"], ["--slo-classes", "a=1:2:3:4", "tbt_ms"]),
        (["serve", "--served-model-name", ""], ["--served-model-name", "name is needed"]),
        (["serve", "--model", ""], ["--model", "name is needed"]),
        (["serve", "--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization", "nan"]),
        (["serve", "--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization", "1.5"]),
        (
            ["serve", "--device", "cpu", "--port", "0", "--preempt", "swap", "--swap-memory", "1KiB"],
            ["1.0 KiB of host memory", "--swap-memory"],
        ),
        (["serve", "--port", "http"], ["--port", "integer"]),
        (["serve", "--port", "70000"], ["--port", "65535"]),
        (["serve", "--drain-seconds", "-1"], ["--drain-seconds"]),
        (["serve", "--port", "0", "--tp", "9"], ["--tp 9", "3 KV heads"]),
        (["serve", "--device", "cpu", "--port", "0", "--kv-dtype", "fp8"], ["--kv-dtype fp8", "takes a GPU"]),
        (["serve", "--kv-dtype", "int4"], ["--kv-dtype", "int8", "int4"]),
        (["serve", "--swap-memory", "1GiB"], ["--swap-memory needs --preempt swap"]),
        (["serve", "--decode-groups", "2"], ["--decode-groups needs --mode separated"]),
        (["serve", "--mode", "separated", "--groups", "2"], ["--groups", "--prefill-groups"]),
        (["serve", "--mode", "apart"], ["--mode", "separated", "apart"]),
        (["serve", "--mode", "separated", "--port", "0", "--decode-tp", "9"], ["--decode-tp 9", "3 KV heads"]),
        (["serve", "--no-such-option"], ["--no-such-option"]),
        (["serve", "--host", "no.such.host.invalid"], ["--host"]),
        (["serve", "unexpected"], ["unexpected"]),
        (["no-such-command"], ["no-such-command"]),
        (["demo", "--streams", "0"], ["--streams"]),
        (["demo", "--policies", "whole,fastest"], ["--policies", "fastest", "chunked"]),
        (["demo", "--policies", ""], ["--policies"]),
        (["demo", "--html", "/no/such/folder/demo.html"], ["--html", "/no/such/folder"]),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    capfd: pytest.CaptureFixture[str], smollm2_dir: Path, arguments: list[str], words: list[str]
) -> None:
    line = complaint(capfd, *arguments, code=2)
    assert all(word in line for word in words), line


def test_a_model_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert "smollm2" in complaint(capfd, "serve", "--model", "no-such-model", "--port", "0", code=1)


def test_a_model_that_is_not_supported(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    line = complaint(capfd, "serve", "--model", str(tmp_path), "--port", "0", code=1)
    assert "BertModel" in line
    assert "LlamaForCausalLM" in line


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, ["no usable tokenizer", "no tokenizer.json is there", "backend tokenizer"]),
        ("tokenizer.json", "{", ["no usable tokenizer", "tokenizer.json is no JSON", "line 1 column 2"]),
        ("tokenizer_config.json", "{", ["no usable tokenizer", "tokenizer_config.json is no JSON"]),
        ("model.safetensors", "no weights", ["model.safetensors cannot be read", "header"]),
    ],
)
def test_a_file_that_is_missing_or_broken_is_found_before_anything_starts(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_model_dir: Path,
    name: str,
    content: str | None,
    words: list[str],
) -> None:
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (model / name).unlink()
    if content is not None:
        (model / name).write_text(content)
    line = complaint(capfd, "serve", "--model", str(model), "--port", "0", code=1)
    assert all(word in line for word in words), line
    assert "Error:" not in line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a sentence"), "a sentence"),
        (TokenizerError("a sentence"), "a sentence"),
        (KeyError("key"), "KeyError: 'key'"),
    ],
)
def test_an_error_of_ours_is_told_without_the_name_of_its_class(error: Exception, said: str) -> None:
    assert last_words("".join(["The replica failed:\n", *traceback.format_exception(error)])) == said
    assert last_words("The replica is starting.") == ""


def test_a_start_promises_no_measurement_that_may_be_known() -> None:
    assert "measuring its iterations if that has not been done" in loading(EngineConfig())
    assert loading(EngineConfig(policy="chunked", profile_seconds=0)) == "loading smollm2"


def test_more_kv_memory_than_there_is(capfd: pytest.CaptureFixture[str], smollm2_dir: Path) -> None:
    line = complaint(capfd, "serve", "--kv-memory", "900TiB", "--port", "0", code=2)
    assert "--kv-memory" in line
    assert "free" in line


def test_a_port_that_is_taken_is_found_before_anything_starts(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = complaint(capfd, "serve", "--port", str(port), "--model", "no-such-model", code=1)
    assert f"port {port}" in line
    assert "--port" in line


def test_a_ray_cluster_that_is_not_there(capfd: pytest.CaptureFixture[str], smollm2_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    assert address in complaint(capfd, "serve", "--port", "0", "--ray-address", address, code=1)


def test_fetch_says_where_the_model_is(capfd: pytest.CaptureFixture[str], smollm2_dir: Path) -> None:
    assert cli.run(["fetch", "smollm2", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"model": "smollm2", "directory": str(smollm2_dir)}
    assert "hub" in complaint(capfd, "fetch", "no-such-model", code=1)
    assert "hub" in complaint(capfd, "fetch", "", code=1)


def test_help_comes_without_what_is_slow_to_import() -> None:
    """And names every option of the engine."""
    script = (
        "import sys; from deploy.cli import run; code = run(['serve', '--help']);"
        "print(sorted({'torch', 'ray', 'transformers', 'numba'} & set(sys.modules)), code)"
    )
    wide = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=wide)
    assert done.stdout.splitlines()[-1] == "[] 0"
    for name in EngineConfig.model_fields:
        assert f"--{name.replace('_', '-')}" in done.stdout


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert cli.run(["--version"]) == 0
    assert capfd.readouterr().out == f"stallfree {version('stallfree')}\n"


# --- the server as a process of its own


MARK = "STALLFREE_TEST_MARK"


def descendants(mark: str) -> dict[int, str]:
    """Processes that inherited the mark, wherever they have been adopted: command lines by id."""
    found = {}
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())
        except psutil.Error:
            continue
    return found


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An own place for temporary files, so that nobody else's are in it; short, for sockets live there."""
    with tempfile.TemporaryDirectory(prefix="sf-", dir="/tmp") as place:
        monkeypatch.setenv("TMPDIR", place)
        yield Path(place)


def shared_memory(pids: Iterable[int]) -> list[str]:
    """Files in shared memory that are named after one of these processes."""
    owned = re.compile(rf"(?<!\d)(?:{'|'.join(map(str, pids))})-")
    return [path.name for path in Path("/dev/shm").glob("*") if owned.search(path.name)]


class Server:
    """`stallfree serve` with a small KV pool. A context manager that kills whatever a failed test leaves."""

    def __init__(self, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "serve", "--num-blocks", "64", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, MARK: self.mark},
            start_new_session=True,
        )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        # By descent too: a title that a process gives itself takes the place of its environment, and of the mark there.
        below = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        for process in (self.process, *below):
            with suppress(psutil.Error):
                process.kill()
        while left := descendants(self.mark):  # what is being killed may just have started something
            for pid in left:
                with suppress(psutil.Error):
                    psutil.Process(pid).kill()
        self.process.communicate()

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        facts: dict[str, Any] = json.loads(line)
        return facts

    def stop(self, number: signal.Signals) -> None:
        """Ctrl-C reaches a whole process group, SIGTERM one process. Ten seconds are promised; a busy machine may
        need some more."""
        if number == signal.SIGINT:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        self.process.wait(20)


REPLICA_PORTS = 2
"""Serve's replicas, an engine's and an API's, have one each that Serve binds to all addresses."""


def open_to_others(pids: Iterable[int]) -> int:
    """Ports that these processes listen on and that other machines can reach."""
    found = [connection for pid in pids for connection in psutil.Process(pid).net_connections()]
    listening = [connection.laddr for connection in found if connection.status == psutil.CONN_LISTEN]
    assert listening
    return sum(not ipaddress.ip_address(address.ip.removeprefix("::ffff:")).is_loopback for address in listening)


def endless_head(url: str) -> int:
    """The status that is answered to headers without end."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        for _ in range(1000):
            with suppress(OSError):
                client.sendall(b"Name: " + b"a" * 1000 + b"\r\n")
        return int(client.recv(100).split()[1])


def nicenesses(pids: Iterable[int], name: str) -> set[int]:
    """Of all threads of the processes whose command lines begin so."""
    found = [process for process in map(psutil.Process, pids) if (process.cmdline() or [""])[0].startswith(name)]
    assert found, name
    threads = [int(task.name) for process in found for task in Path(f"/proc/{process.pid}/task").iterdir()]
    return {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}


def complete(url: str, model: str) -> str:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.timeout(600)  # two starts, of a Ray each
def test_a_server_stops_without_a_trace_and_starts_again_at_once(smollm2_dir: Path, temporary: Path) -> None:
    """Twice on the same port, ended by each of the two signals."""
    port = "0"
    for number in (signal.SIGTERM, signal.SIGINT):
        with Server("--json", "--port", port) as server:
            facts = server.ready()
            assert facts["model"] == "smollm2"
            assert facts["kv_tokens"] == 64 * facts["block_size"]
            assert "Paris" in complete(facts["url"], facts["model"])
            pids = set(descendants(server.mark))
            assert len(pids) > 3
            assert open_to_others(pids) == REPLICA_PORTS
            modes = {psutil.Process(pid).environ().get("RAY_AUTH_MODE") for pid in pids - {server.process.pid}}
            assert modes == {"token"}, "which answer nobody who does not know it"
            assert endless_head(facts["url"]) in (400, 431)
            if sys.platform == "linux":
                own = nicenesses({server.process.pid}, "")
                replica = f"ray::ServeReplica:{APPLICATION}"
                for name in ("ray::RankActor", "ray::SchedulerActor", "ray::ProxyActor", f"{replica}:Api"):
                    assert nicenesses(pids, name) == own, name
                for name in ("ray::ServeController", f"{replica}:Engine"):
                    assert nicenesses(pids, name) == {NICENESS}, name
            server.stop(number)
            assert server.process.returncode == 0
            assert descendants(server.mark) == {}
            assert shared_memory(pids) == []
        port = facts["url"].rsplit(":", 1)[1]
        with socket.create_server(("127.0.0.1", int(port))):
            pass
    assert list(temporary.glob("stallfree-*")) == []


@pytest.mark.parametrize("stage", ["starting Ray", "loading"])
def test_a_signal_during_the_start_ends_everything(smollm2_dir: Path, temporary: Path, stage: str) -> None:
    with Server("--port", "0") as server:
        assert server.process.stderr is not None
        while stage not in server.process.stderr.readline():
            assert server.process.poll() is None
        server.stop(signal.SIGTERM)
        assert server.process.returncode == 0
        assert descendants(server.mark) == {}
    assert list(temporary.glob("stallfree-*")) == []
