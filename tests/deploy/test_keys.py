"""API keys: who may ask, what those who may not are told, and that tenants do not see one another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from cluster.local import LocalEngine
from deploy import cli
from deploy.api import ApiSettings, create_api
from deploy.api.keys import Key, known, new_secret, parse_keys, read_keys
from deploy.app import build_app
from deploy.commands import serve as serve_command
from tests.deploy.conftest import MODEL, in_process, served
from tests.deploy.test_prefixes import cached
from tests.deploy.wire import error_of
from workers.tokenizer import Tokenizer

ALICE, BOB = new_secret(), new_secret()
KEYS = (Key.of("alice", ALICE), Key.of("bob", BOB))
GUARDED = ("/v1/models", "/metrics", "/v1/stallfree/iterations", "/docs", "/openapi.json", "/nothing", "//health")


def guarded(engine: LocalEngine, tokenizer: Tokenizer, keys: Sequence[Key] = KEYS) -> httpx.AsyncClient:
    return in_process(create_api(engine, tokenizer, ApiSettings(api_keys=tuple(keys))))


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ([], "missing_api_key"),
        ([("X-Api-Key", ALICE)], "missing_api_key"),
        ([("Authorization", ALICE)], "invalid_api_key"),
        ([("Authorization", "Bearer ")], "invalid_api_key"),
        ([("Authorization", f"Basic {ALICE}")], "invalid_api_key"),
        ([("Authorization", f"Bearer {ALICE[:-1]}")], "invalid_api_key"),
        ([("Authorization", f"Bearer {ALICE}x")], "invalid_api_key"),
        ([("Authorization", "Bearer " + "x" * 100_000)], "invalid_api_key"),
        ([("Authorization", f"Bearer {KEYS[0].digest.hex()}")], "invalid_api_key"),
        ([("Authorization", b"Bearer \xff\xfe")], "invalid_api_key"),
        ([("Authorization", f"Bearer {ALICE}"), ("Authorization", f"Bearer {BOB}")], "invalid_api_key"),
    ],
)
async def test_without_a_known_key(
    engine: LocalEngine, tokenizer: Tokenizer, headers: list[tuple[str, str | bytes]], code: str
) -> None:
    raw = [(name.encode(), value if isinstance(value, bytes) else value.encode()) for name, value in headers]
    async with guarded(engine, tokenizer) as client:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
        answers = [await client.post("/v1/completions", json=body, headers=raw)]
        answers += [await client.get(path, headers=raw) for path in GUARDED]
        answers += [await client.post("/health", headers=raw), await client.options("/v1/models", headers=raw)]
        for answer in answers:
            error = error_of(answer, 401)
            assert (error["type"], error["code"]) == ("invalid_request_error", code)
            assert answer.headers["www-authenticate"].startswith('Bearer realm="stallfree"')
            assert ALICE not in answer.text
        for path in ("/health", "/ready"):
            assert (await client.get(path, headers=raw)).status_code == 200


async def test_with_one(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    async with guarded(engine, tokenizer) as client:
        for secret in (ALICE, BOB):
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
            for kind in ("Bearer", "bearer"):
                answer = await client.post("/v1/completions", json=body, headers={"Authorization": f"{kind} {secret}"})
                assert answer.status_code == 200
            assert (await client.get("/metrics", headers=bearer(secret))).status_code == 200
            assert error_of(await client.get("/v1/nothing", headers=bearer(secret)), 404)["code"] == "not_found"


async def test_one_who_sends_much_is_told_as_well(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    """On a real socket, where closing it on unread bytes would reset the connection and the answer with it."""
    async with (
        served(create_api(engine, tokenizer, ApiSettings(api_keys=KEYS))) as url,
        httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client,
    ):
        for _ in range(3):
            error_of(await client.post("/v1/completions", content=b"a" * (9 * 2**20)), 401)


async def test_tenants_do_not_share_what_is_cached(engine: LocalEngine, tokenizer: Tokenizer) -> None:
    """Nor by a salt, whatever it looks like."""
    words = " ".join(f"tenant{number}" for number in range(40))
    replacement = Key.of("alice", new_secret_of_alice := new_secret())
    async with guarded(engine, tokenizer, (*KEYS, replacement)) as client:

        async def reused(secret: str, **fields: str) -> int:
            body = {"model": MODEL, "prompt": words, "max_tokens": 1, **fields}
            return cached((await client.post("/v1/completions", json=body, headers=bearer(secret))).json())

        assert await reused(ALICE) == 0
        assert await reused(ALICE) > 0
        assert await reused(new_secret_of_alice) > 0, "another key of the same name is the same tenant"
        assert await reused(BOB) == 0
        assert await reused(BOB, cache_salt="alice:") == 0
        assert await reused(ALICE, cache_salt="s") == 0
        assert await reused(BOB, cache_salt="s") == 0
        assert await reused(ALICE, cache_salt="s") > 0


# Files and options.


def test_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n{KEYS[0]}\n  {KEYS[1]}  \n")
    assert read_keys(file) == KEYS
    assert parse_keys(f"{KEYS[0]},{KEYS[1]}") == KEYS
    assert known(BOB.encode(), KEYS) == KEYS[1]
    assert known(b"", KEYS) is None
    heavy = Key.parse(f"{KEYS[0]}:2.5")
    assert heavy.weight == 2.5
    assert Key.parse(str(heavy)) == heavy


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no keys"),
        ("# none\n", "no keys"),
        (f"{KEYS[0]}\n{ALICE}\n", "line 2"),
        (f"alice:{ALICE}\n", "line 1"),
        (f"a b:{KEYS[0].digest.hex()}\n", "line 1"),
        (f":{KEYS[0].digest.hex()}\n", "line 1"),
        (f"alice:{KEYS[0].digest.hex()[:-1]}\n", "line 1"),
        (f"{KEYS[0]}:extra:more\n", "line 1"),
        *((f"{KEYS[0]}:{weight}\n", "weight") for weight in ("0", "-1", "nan", "inf", "1e9", "1001", "")),
        ("\xff", "UTF-8"),
    ],
)
def test_a_file_that_is_wrong_is_one_line_that_repeats_no_key(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    file = tmp_path / "keys"
    file.write_bytes(content.encode("latin-1"))
    assert cli.run(["serve", "--api-key-file", str(file)]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("stallfree: --api-key-file: ")
    assert err.count("\n") == 1
    assert said in err
    assert ALICE not in err


@pytest.mark.parametrize("given", ["", ",", f"{ALICE},", f"{ALICE} x", f"{ALICE}ü", f"{ALICE}\n"])
def test_an_option_that_is_wrong(tmp_path: Path, capfd: pytest.CaptureFixture[str], given: str) -> None:
    if given.endswith("\n"):
        given = "\x7f"
    assert cli.run(["serve", "--api-key", given]) == 2
    err = capfd.readouterr().err
    assert err.startswith("stallfree: --api-key: ")
    assert ALICE not in err


def test_arguments_of_the_application_repeat_no_key() -> None:
    for wrong in (ALICE, f"alice:{ALICE}", "", [ALICE], 5):
        with pytest.raises(ValueError, match="api_keys") as raised:
            build_app({"model": MODEL, "api_keys": wrong})
        assert ALICE not in str(raised.value)
    assert ALICE not in repr(ApiSettings(api_keys=KEYS))
    assert KEYS[0].digest.hex() not in repr(ApiSettings(api_keys=KEYS))


def test_a_new_key(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["key", "team-a"]) == 0
    out, err = capfd.readouterr()
    assert Key.parse(out) == Key.of("team-a", err.strip())
    assert cli.run(["key", "team-a", "--json"]) == 0
    out, err = capfd.readouterr()
    made = json.loads(out)
    assert err == ""
    assert made["line"] == str(Key.of("team-a", made["key"]))
    assert cli.run(["key", "team a"]) == 2


@pytest.mark.parametrize(
    ("host", "keys", "given", "words"),
    [
        ("127.0.0.1", (), [], []),
        ("localhost", (), [], []),
        ("::1", (), [], []),
        ("0.0.0.0", KEYS, [ALICE], []),
        ("0.0.0.0", (), [], ["0.0.0.0"]),
        ("::", (), [], ["::"]),
        ("example.org", (), [], ["example.org"]),
        ("0.0.0.0", KEYS, [f"{ALICE},short"], ["guessed"]),
    ],
)
def test_warnings(host: str, keys: tuple[Key, ...], given: list[str], words: list[str]) -> None:
    said = list(serve_command.warnings(host, keys, given))
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))
    assert ALICE not in "".join(said)
