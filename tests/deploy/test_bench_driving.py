"""The load test's client against a scripted server: when it sends, how it counts, and what it makes of errors. No test
looks at how long anything takes: the server waits for what the client has seen, or the client for the server."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.workloads import ClosedLoop, Interference, OpenLoop, PlannedRequest, RandomPrompt
from deploy.bench import Target, drive, figures
from deploy.bench.events import DONE, Lines, TokenClock, spread
from deploy.bench.record import CountedBy, Outcome, RunRecord
from deploy.bench.sending import Sending
from deploy.errors import CommandError
from tests.deploy.bench_server import Body, Reply, fake, speak
from tests.deploy.conftest import until


def plan(prompt: str = "hello", at_s: float = 0.0, output_tokens: int = 3) -> PlannedRequest:
    return PlannedRequest(prompt, output_tokens, at_s)


# --- sending


async def test_a_server_that_does_not_answer_delays_no_request() -> None:
    """Nothing is answered before all requests have come; a client that waited would wait for ever."""
    everybody, count = asyncio.Event(), 40

    async def after_all(body: Body, reply: Reply) -> None:
        if len(server.bodies) == count:
            everybody.set()
        await everybody.wait()
        await speak(body, reply)

    async with fake(after_all) as server:
        run = await drive(Target(server.url), OpenLoop([plan(at_s=0.005 * number) for number in range(count)]))
    assert [record.outcome for record in run.requests] == [Outcome.FINISHED] * count
    assert all(record.sent_s >= record.due_s for record in run.requests)
    last_sent = max(record.sent_s for record in run.requests)
    assert all(record.tokens[0] > last_sent for record in run.requests)
    assert figures(run).lateness.n == count


async def test_requests_are_sent_in_the_order_in_which_they_are_due() -> None:
    async with fake() as server:
        plans = [plan("late", 0.05), plan("early", 0.0), plan("between", 0.025)]
        run = await drive(Target(server.url), OpenLoop(plans))
    assert [body["prompt"] for body in server.bodies] == ["early", "between", "late"]
    assert [record.due_s for record in run.requests] == [0.0, 0.025, 0.05]


async def test_a_closed_loop_has_never_more_and_never_fewer_under_way() -> None:
    """The server answers only when as many wait as should be."""
    waiting: list[asyncio.Event] = []
    most = 0

    async def when_three_wait(body: Body, reply: Reply) -> None:
        nonlocal most
        mine = asyncio.Event()
        waiting.append(mine)
        most = max(most, len(waiting))
        last = len(server.bodies) == 9
        for event in waiting[:] if last else waiting[: len(waiting) - 2]:
            event.set()
            waiting.remove(event)
        await mine.wait()
        await speak(body, reply)

    async with fake(when_three_wait) as server:
        run = await drive(Target(server.url), ClosedLoop([plan() for _ in range(9)], 3))
    assert most == 3
    assert [record.outcome for record in run.requests] == [Outcome.FINISHED] * 9
    assert figures(run).lateness.n == 0


async def test_the_long_prompt_comes_after_the_lead_and_the_streams_outlast_it() -> None:
    sent = {"stream": 0}

    async def endless(body: Body, reply: Reply) -> None:
        if body["prompt"] == "long":
            assert sent["stream"] >= 2 * 4
            await speak(body, reply)
            return
        await reply.open()
        for token in range(body["max_tokens"]):
            await reply.event({"choices": [{"text": "a", "token_ids": [token]}]})
            sent["stream"] += 1
            await asyncio.sleep(0.002)
        await reply.done()

    streams = [PlannedRequest("stream", 100_000, kind="stream") for _ in range(2)]
    workload = Interference(streams, PlannedRequest("long", 3, kind="long"), lead=4, tail=5)
    async with fake(endless) as server:
        run = await drive(Target(server.url), workload)
    found = figures(run)
    assert found.errors == {}
    assert found.intrusion is not None
    assert found.intrusion.running == 2
    assert found.intrusion.before.n >= 2 * 3
    assert all(record.left for record in run.requests if record.kind == "stream")


async def test_streams_that_end_early_hold_nobody_up() -> None:
    streams = [PlannedRequest("stream", 3, kind="stream") for _ in range(2)]
    async with fake() as server:
        run = await drive(Target(server.url), Interference(streams, PlannedRequest("long", 3, kind="long")))
    found = figures(run)
    assert found.finished == 3
    assert "2 of 2 streams had ended before" in " ".join(found.warnings)


async def test_warm_up_is_sent_and_not_recorded() -> None:
    plans = [PlannedRequest(RandomPrompt(8, f"own/{number}"), 4) for number in range(2)]
    async with fake() as server:
        run = await drive(Target(server.url), OpenLoop(plans), warmup=3)
    assert len(server.bodies) == 3 + 2
    assert len(run.requests) == 2
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == 5  # nothing that a prefix cache could have learnt


async def test_a_run_that_is_stopped_keeps_what_it_has() -> None:
    stop = asyncio.Event()

    async def then_stop(body: Body, reply: Reply) -> None:
        if len(server.bodies) == 1:
            await speak(body, reply)
            return
        await reply.open()
        await reply.event({"choices": [{"text": "a", "token_ids": [1]}]})
        stop.set()
        await asyncio.Event().wait()

    async with fake(then_stop) as server:
        workload = ClosedLoop([plan() for _ in range(5)], 1)
        run = await drive(Target(server.url), workload, stop=stop)
    assert run.interrupted
    assert [record.outcome for record in run.requests] == [Outcome.FINISHED, Outcome.UNFINISHED]
    assert "2 of 5 requests had been sent" in " ".join(figures(run).warnings)


async def test_extra_fields_and_the_key_are_sent() -> None:
    slo = {"ttft_ms": 100.0}
    target_extra = {"slo": {"ttft_ms": 1.0}, "top_p": 0.5}
    async with fake() as server:
        target = Target(server.url, model="mine", api_key="secret", extra=target_extra)
        await drive(target, OpenLoop([PlannedRequest([1, 2], 3, extra={"slo": slo})]))
    body = server.bodies[0]
    assert (body["slo"], body["top_p"], body["model"], body["prompt"]) == (slo, 0.5, "mine", [1, 2])
    assert server.headers[0]["authorization"] == "Bearer secret"


# --- counting


async def test_each_token_has_the_time_at_which_it_came() -> None:
    """Three chunks, of one, three and two tokens; each is sent after the one before has been seen."""
    came: list[float] = []
    sending = Sending(plan(output_tokens=6), b'{"max_tokens": 6}', 0.0)

    async def in_chunks(body: Body, reply: Reply) -> None:
        await reply.open()
        seen = 0
        for tokens in ([1], [2, 3, 4], [5, 6]):
            came.append(time.perf_counter())
            await reply.event({"choices": [{"text": "x", "token_ids": tokens}]})
            seen += len(tokens)
            await until(lambda wanted=seen: len(sending.clock.times) == wanted)  # type: ignore[misc]
        await reply.done()

    async with fake(in_chunks) as server, Target(server.url).client() as client:
        await sending.run(client, "/v1/completions")
        ended = time.perf_counter()
    record = sending.record
    assert record is not None
    assert record.counted_by is CountedBy.TOKEN_IDS
    one, two, three, four, five, six = record.tokens
    assert two == three == four
    assert five == six
    assert came[0] <= one <= came[1] <= two <= came[2] <= five <= record.ended_s <= ended
    assert record.gaps.count(0.0) == 3


def clock(*events: Body) -> TokenClock:
    seen = TokenClock()
    for number, event in enumerate(events):
        seen.note(event, float(number))
    seen.close()
    return seen


def chunk(text: str, total: int | None = None, **more: object) -> Body:
    usage = {"usage": {"prompt_tokens": 7, "completion_tokens": total}} if total is not None else {}
    return {"choices": [{"text": text, **more}], **usage}


def test_tokens_are_counted_by_what_the_server_tells() -> None:
    ids = clock(chunk("", token_ids=[1]), chunk("ab", token_ids=[2, 3]))
    assert (ids.times, ids.counted_by) == ([0.0, 1.0, 1.0], CountedBy.TOKEN_IDS)
    usage = clock(chunk("a", 1), chunk("", 2), chunk("bc", 4), {"choices": [], "usage": {"completion_tokens": 4}})
    assert (usage.times, usage.counted_by, usage.prompt_tokens) == ([0.0, 1.0, 2.0, 2.0], CountedBy.USAGE, 7)
    both = clock(chunk("a", 1, token_ids=[5]), chunk("b", 2, token_ids=[6]))
    assert (both.times, both.counted_by) == ([0.0, 1.0], CountedBy.TOKEN_IDS)
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": {"completion_tokens": 1}}
    opened = clock(
        role, {"choices": [{"delta": {"content": "a"}, "token_ids": [5]}], "usage": {"completion_tokens": 1}}
    )
    assert opened.times == [0.0]
    chunks = clock(chunk("a"), chunk(""), chunk("b"), {"choices": []})
    assert (chunks.times, chunks.counted_by) == ([0.0, 2.0], CountedBy.CHUNKS)
    total = clock(chunk("a"), chunk("bc"), chunk("d"), {"choices": [], "usage": {"completion_tokens": 5}})
    assert (total.times, total.counted_by) == ([0.0, 0.0, 1.0, 2.0, 2.0], CountedBy.FINAL_USAGE)
    agreeing = clock(chunk("a"), chunk("b"), {"choices": [], "usage": {"completion_tokens": 2}})
    assert (agreeing.times, agreeing.counted_by) == ([0.0, 1.0], CountedBy.CHUNKS)
    last_with_usage = clock(chunk("a"), chunk("b", 2, finish_reason="stop"))
    assert (last_with_usage.times, last_with_usage.finished) == ([0.0, 1.0], True)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=20).map(sorted), st.integers(1, 60))
def test_a_spread_keeps_both_ends(times: list[float], total: int) -> None:
    found = spread(times, total)
    assert len(found) == total
    assert found == sorted(found)
    assert found[0] == times[0]
    assert total == 1 or found[-1] == times[-1]


_KEYS = st.sampled_from(["choices", "usage", "delta", "text", "token_ids", "completion_tokens"])
_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
_JSON = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner), max_leaves=12)


@given(st.lists(st.dictionaries(st.sampled_from(["choices", "usage", "x"]), _JSON), max_size=6))
def test_whatever_shape_an_event_has_counting_goes_on(events: list[Body]) -> None:
    seen = clock(*events)
    assert seen.times == sorted(seen.times)


@given(st.lists(st.integers(1, 30), max_size=30), st.sampled_from([b"\n", b"\r\n"]))
def test_events_do_not_depend_on_how_bytes_arrive(cuts: list[int], ending: bytes) -> None:
    whole = ending.join(
        [b": a comment", b'data: {"a": "\xc3\xa4"}', b"", b"event: x", b'data:{"b":2}', b"", b"data: [DONE]", b""]
    )
    lines, events, start = Lines(), [], 0
    for cut in [*cuts, len(whole)]:
        events += list(lines.feed(whole[start : start + cut]))
        start += cut
    assert events == [{"a": "ä"}, {"b": 2}, DONE]


# --- errors


async def misbehave(body: Body, reply: Reply) -> None:
    """As the prompt says."""
    how = body["prompt"]
    if how == "429":
        await reply.json(429, {"error": {"message": "too many", "code": "queue_full"}})
    elif how == "503":
        await reply.json(503, {"error": {"message": "not now", "code": "engine_unavailable"}})
    elif how == "500":
        await reply.json(500, b"<html>oh</html>")
    elif how == "closed":
        reply.reset()
    else:
        await reply.open()
        await reply.event({"choices": [{"text": "a", "token_ids": [1]}]})
        if how == "event":
            await reply.event({"error": {"message": "worker died", "code": "worker_lost"}})
        elif how == "reset":
            await asyncio.sleep(0.02)  # so that the token is not lost with the connection
            reply.reset()
        elif how == "garbage":
            await reply.raw(b"data: {nonsense\n\n")
        elif how == "silent":
            await asyncio.Event().wait()
        elif how == "fine":
            await reply.done()


async def test_errors_are_counted_by_kind_and_end_nothing() -> None:
    expected = {
        "429": "429", "503": "503 engine_unavailable", "500": "500", "closed": "connection", "reset": "cut short",
        "cut": "cut short", "event": "stream error worker_lost", "garbage": "malformed event", "silent": "timeout",
        "fine": None,
    }  # fmt: skip
    async with fake(misbehave) as server:
        target = Target(server.url, timeout_s=2.0)
        run = await drive(target, OpenLoop([plan(how, 0.001 * place) for place, how in enumerate(expected)]))
    assert [record.error for record in run.requests] == list(expected.values())
    found = figures(run)
    assert (found.finished, found.failed) == (1, 9)
    assert found.errors["cut short"] == 2
    assert sum(found.errors.values()) == 9
    assert len(server.bodies) == len(expected)  # nothing was sent twice
    assert all(record.message for record in run.requests if record.error)


async def test_an_answer_without_a_token_is_an_error() -> None:
    async def nothing(body: Body, reply: Reply) -> None:
        await reply.open()
        await reply.done()

    async with fake(nothing) as server:
        run = await drive(Target(server.url), OpenLoop([plan()]))
    assert run.requests[0].error == "no tokens"
    assert "no token came" in figures(run).warnings


# --- what the server understands


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
