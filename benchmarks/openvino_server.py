"""OpenVINO GenAI's continuous batching over HTTP, as much of it as `benchmarks.peers` asks.

    python openvino_server.py MODEL PORT DIRECTORY

Run in an environment with `openvino-genai` and `optimum-intel[openvino]`, and nothing of ours. MODEL, a directory in
Hugging Face layout, is converted in float32 into DIRECTORY first. The scheduler has OpenVINO's own defaults, with 2 GiB
of KV; what is computed and kept is float32.
"""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

KV_GIB = 2
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


def convert(model: str, directory: str) -> None:
    tool = str(Path(sys.executable).parent / "optimum-cli")
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    subprocess.run([tool, "export", "openvino", "--model", model, *options, directory], check=True)


class Engine:
    """One thread makes the steps; each request has a queue of its tokens, at whose end is None."""

    def __init__(self, directory: str) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = KV_GIB
        self._pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", FLOAT32)
        self.tokenizer = self._pipeline.get_tokenizer()
        self._numbers = itertools.count()
        self._came = threading.Condition()
        self._new: list[tuple[Any, int, queue.Queue[int | None]]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, prompt: list[int] | str, most: int) -> queue.Queue[int | None]:
        given: Any = prompt if isinstance(prompt, str) else openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        tokens: queue.Queue[int | None] = queue.Queue()
        with self._came:
            self._new.append((given, most, tokens))
            self._came.notify()
        return tokens

    def _run(self) -> None:
        open_ones: list[tuple[Any, queue.Queue[int | None]]] = []
        while True:
            with self._came:
                while not (self._new or open_ones):
                    self._came.wait()
                new, self._new = self._new, []
            for given, most, tokens in new:
                config = genai.GenerationConfig()
                config.max_new_tokens, config.ignore_eos, config.do_sample = most, True, False
                open_ones.append((self._pipeline.add_request(next(self._numbers), given, config), tokens))
            self._pipeline.step()
            open_ones = [each for each in open_ones if _hand_out(*each)]


def _hand_out(handle: Any, tokens: queue.Queue[int | None]) -> bool:
    """What a request got; whether there will be more."""
    ended = handle.get_status() != genai.GenerationStatus.RUNNING
    while handle.can_read():
        for output in handle.read().values():
            for token in output.generated_ids:
                tokens.put(token)
    if ended:
        tokens.put(None)
    return not ended


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = self.engine.ask(asked["prompt"], asked["max_tokens"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        count = 0
        while (token := tokens.get()) is not None:
            count += 1
            choice = {"index": 0, "text": self.engine.tokenizer.decode([token]), "token_ids": [token]}
            self._event({"choices": [{**choice, "finish_reason": None}], "usage": {"completion_tokens": count}})
        self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()

    def _answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: Any) -> None:
        pass


def main() -> None:
    model, port, directory = sys.argv[1:]
    convert(model, directory)
    Handler.engine = Engine(directory)
    ThreadingHTTPServer.request_queue_size = 64
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
