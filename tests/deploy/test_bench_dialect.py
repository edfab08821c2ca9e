"""Fields that a server does not know are left out, and what it cannot do is said in one line."""

from __future__ import annotations

import pytest

from cluster.workloads import OpenLoop, PlannedRequest, RandomPrompt
from deploy.bench import Target, drive
from deploy.bench.record import CountedBy, RunRecord
from deploy.errors import CommandError
from tests.deploy.bench_server import Body, Reply, fake, plan


async def detected(
    allowed: set[str], *, ids: bool, endpoint: str = "completions"
) -> tuple[RunRecord, Body, list[Body]]:
    """A run against a server that knows these fields only, and its one request's body."""

    def refuses(body: Body) -> str | None:
        unknown = set(body) - allowed - {"model", "prompt", "messages", "stream"}
        if unknown:
            return f"unknown {unknown}"
        if "continuous_usage_stats" in body.get("stream_options", {}) and "return_token_ids" not in allowed:
            return "unknown stream option"
        return "no ids" if not ids and isinstance(body.get("prompt"), list) else None

    async def plainly(body: Body, reply: Reply) -> None:
        await reply.open()
        for _ in range(3):
            await reply.event({"choices": [{"text": "a", "delta": {"content": "a"}}]})
        if body.get("stream_options"):
            await reply.event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 4}})
        await reply.done()

    async with fake(plainly, refuses) as server:
        target = Target(server.url, endpoint=endpoint)  # type: ignore[arg-type]
        run = await drive(target, OpenLoop([PlannedRequest(RandomPrompt(5, "x"), 4)]))
    return run, server.bodies[0], server.probes


OURS = {"max_tokens", "stream_options", "return_token_ids", "ignore_eos", "temperature"}


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize(
    ("allowed", "counted"),
    [
        (OURS, CountedBy.FINAL_USAGE),
        (OURS - {"return_token_ids"}, CountedBy.FINAL_USAGE),
        (OURS - {"return_token_ids", "ignore_eos"}, CountedBy.FINAL_USAGE),
        ({"max_tokens", "temperature"}, CountedBy.CHUNKS),
        ({"max_tokens"}, CountedBy.CHUNKS),
    ],
)
async def test_fields_that_a_server_refuses_are_left_out(allowed: set[str], counted: CountedBy, ids: bool) -> None:
    run, body, probes = await detected(allowed, ids=ids)
    assert set(body) == {"model", "prompt", "stream", *allowed}
    assert isinstance(body["prompt"], list) is ids
    record = run.requests[0]
    assert record.counted_by is counted
    assert len(record.tokens) == (4 if counted is CountedBy.FINAL_USAGE else 3)
    assert record.prompt_tokens == (9 if counted is CountedBy.FINAL_USAGE else 5)
    assert len(probes) <= 10
    assert run.facts["prompts"] == ("token ids" if ids else "text")


async def test_a_chat_of_a_newer_kind() -> None:
    _, body, _ = await detected({"max_completion_tokens", "stream_options"}, ids=False, endpoint="chat")
    assert set(body) == {"model", "messages", "stream", "max_completion_tokens", "stream_options"}
    assert len(body["messages"][0]["content"].split()) == 5


async def test_a_server_that_refuses_everything_is_one_line() -> None:
    async with fake(refuses=lambda body: "never") as server:
        with pytest.raises(CommandError, match="refuses a small request: 400 never"):
            await drive(Target(server.url), OpenLoop([plan()]))


async def test_ids_are_not_sent_as_text() -> None:
    async with fake(refuses=lambda body: "no ids" if isinstance(body["prompt"], list) else None) as server:
        with pytest.raises(CommandError, match="takes no token ids"):
            await drive(Target(server.url), OpenLoop([PlannedRequest([1, 2, 3], 4)]))


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host", "http://", "http://host:99999", "http://[::1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not a URL"):
        Target(url)


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_a_url_with_or_without_v1(url: str) -> None:
    assert Target(url).base == "http://host:1"
