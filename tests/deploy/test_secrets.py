"""Neither what clients send nor a key is in any output or file of a running server, at its default log level."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from deploy.api.keys import Key, new_secret
from tests.deploy.test_cli import Server, descendants, temporary

__all__ = ["temporary"]

PROMPT, WRONG = (f"marker{uuid.uuid4().hex}" for _ in range(2))
GIVEN, FROM_VARIABLE, FROM_FILE = (new_secret() for _ in range(3))
SECRETS = [text.encode() for text in (PROMPT, WRONG, GIVEN, FROM_VARIABLE, FROM_FILE)]


def found_in(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            yield from (f"{secret.decode()} in {path}" for secret in SECRETS if secret in content)


def ask(client: httpx.Client, model: str) -> None:
    """With success, and with errors of several kinds that name what a client sent."""
    chat = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    text = {"model": model, "prompt": PROMPT, "max_tokens": 4}
    requests: list[tuple[str, dict[str, Any], int]] = [
        ("/v1/completions", text, 200),
        ("/v1/completions", {**text, "stream": True}, 200),
        ("/v1/chat/completions", chat, 200),
        ("/v1/chat/completions", {**chat, "stream": True, "user": PROMPT, "stop": PROMPT}, 200),
        ("/v1/completions", {**text, "prompt": PROMPT * 2000}, 400),
        ("/v1/completions", {**text, PROMPT: PROMPT}, 400),
        ("/v1/completions", {**text, "temperature": PROMPT}, 400),
        ("/v1/completions", {**text, "model": PROMPT}, 404),
        (f"/{PROMPT}", text, 404),
    ]
    for path, body, status in requests:
        answer = client.post(path, json=body)
        assert answer.status_code == status, answer.text
    for secret in (WRONG, Key.of("a", GIVEN).digest.hex()):
        assert (
            client.post("/v1/completions", json=text, headers={"Authorization": f"Bearer {secret}"}).status_code == 401
        )


@pytest.mark.timeout(600)  # a Ray is started
def test_neither_prompts_nor_keys_are_written_down(
    tiny_model_dir: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{Key.of('team', FROM_FILE)}\n")
    monkeypatch.setenv("STALLFREE_API_KEY", FROM_VARIABLE)
    arguments = ["--model", str(tiny_model_dir), "--profile-seconds", "0", "--port", "0", "--json"]
    with Server(*arguments, "--api-key", GIVEN, "--api-key-file", str(file)) as server:
        facts = server.ready()
        for secret in (GIVEN, FROM_FILE):
            headers = {"Authorization": f"Bearer {secret}"}
            with httpx.Client(base_url=facts["url"], headers=headers, timeout=60, trust_env=False) as client:
                ask(client, facts["model"])
        assert any(path.suffix in (".log", ".out", ".err") for path in temporary.rglob("*")), "no log was looked at"
        assert list(found_in(temporary)) == []
        started = set(descendants(server.mark)) - {server.process.pid}
        assert len(started) > 3
        for pid in started:
            about = json.dumps([psutil.Process(pid).environ(), psutil.Process(pid).cmdline()])
            assert not [secret for secret in SECRETS if secret.decode() in about]
        assert GIVEN not in " ".join(psutil.Process(server.process.pid).cmdline())
        server.stop(signal.SIGTERM)
        out, err = server.process.communicate()
        assert not [secret for secret in SECRETS if secret.decode() in json.dumps(facts) + out + err]
