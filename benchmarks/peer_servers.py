"""Other engines as servers of the embedded model in fp32, each in an environment and in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

START_S = 300.0
LONGEST = 4096
"""Tokens of a sequence."""
STREAMS = 32

_LLAMA = """
import sys, time, xllamacpp
p = xllamacpp.CommonParams()
p.model.path, p.port, p.n_parallel, p.n_ctx, p.kv_unified = sys.argv[1], int(sys.argv[2]), {streams}, {context}, True
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[3])
p.cache_ram_mib = 0
server = xllamacpp.Server(p)
while True:
    time.sleep(3600)
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """`command` of (environment, port, model directory, GGUF file) and what is added to the environment's variables.
    `names_model`: requests give it the model's directory as its name."""

    name: str
    command: Callable[[Path, int, Path, Path], list[str]]
    variables: dict[str, str]
    names_model: bool = False


def _llama(environment: Path, port: int, folder: Path, gguf: Path) -> list[str]:
    script = _LLAMA.format(streams=STREAMS + 1, context=STREAMS * 512 + LONGEST)
    return [str(environment / "bin/python"), "-c", script, str(gguf), str(port), str(os.cpu_count())]


def _vllm(environment: Path, port: int, folder: Path, gguf: Path) -> list[str]:
    options = ["--dtype", "float32", "--max-model-len", str(LONGEST), "--host", "127.0.0.1", "--port", str(port)]
    return [
        str(environment / "bin/python"),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        *options,
    ]


def _transformers(environment: Path, port: int, folder: Path, gguf: Path) -> list[str]:
    options = ["--continuous-batching", "--device", "cpu", "--dtype", "float32", "--port", str(port)]
    return [str(environment / "bin/transformers"), "serve", str(folder), "--host", "127.0.0.1", *options]


def _openvino(environment: Path, port: int, folder: Path, gguf: Path) -> list[str]:
    script = Path(__file__).with_name("openvino_server.py")
    return [str(environment / "bin/python"), str(script), str(folder), str(port), str(gguf.parent / "openvino")]


_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "86400",  # it counts the time in which it is stopped
}

PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", _llama, {}),
        Peer("vllm", _vllm, _VLLM),
        Peer("transformers", _transformers, {}, names_model=True),
        Peer("openvino", _openvino, {}),
    )
}


class Turn:
    """`with` it a server's processes run; otherwise they are stopped, so that they take nothing from the others."""

    def __init__(self, group: int) -> None:
        self._group = group
        self.__exit__()

    def __enter__(self) -> None:
        os.killpg(self._group, signal.SIGCONT)

    def __exit__(self, *raised: object) -> None:
        os.killpg(self._group, signal.SIGSTOP)


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    group: int

    def turn(self) -> Turn:
        """From now on it runs only in its turns."""
        return Turn(self.group)


@contextmanager
def running(peer: Peer, environment: Path, port: int, folder: Path, gguf: Path, log: Path) -> Iterator[Running]:
    """The peer, once it answers. Raises RuntimeError where it does not; what it said is in the log."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **peer.variables}
    with log.open("w") as said:
        process = subprocess.Popen(
            peer.command(environment, port, folder, gguf),
            env=variables,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, peer.name, log)
            yield Running(url, process.pid)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, name: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"{name} did not come up; {log} has what it said")


def float_gguf(source: Path, target: Path) -> None:
    """A GGUF file with the same content as another, its tensors in float32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None  # every such file has it
    writer = GGUFWriter(target, architecture.contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(0)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
