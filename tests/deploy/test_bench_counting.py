"""Each token has one time, however the server packs and counts them."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from deploy.bench import Target
from deploy.bench.events import DONE, Lines, TokenClock, spread
from deploy.bench.record import CountedBy
from deploy.bench.sending import Sending
from tests.deploy.bench_server import Body, Reply, fake, plan
from tests.deploy.conftest import until


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

    async with fake(in_chunks) as server, Target(server.url).session() as session:
        await sending.run(session, f"{server.url}/v1/completions")
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
