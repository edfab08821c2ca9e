"""The wire: everything comes back as it was, and everything else is a WireError."""

from __future__ import annotations

import math
import pickle

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import codec
from scheduler.errors import WireError
from scheduler.plan import Admission, Forward, IterationPlan, IterationResult, Segment, Swap
from scheduler.request import Delta, Finish, Request, TokenLogprob
from scheduler.sampling import SamplingParams
from scheduler.slo import Grant, Promise

counts = st.integers(0, 2**40)
floats = st.floats(allow_nan=False)
token_lists = st.lists(counts, max_size=8).map(tuple)
pairs = st.lists(st.tuples(counts, floats), max_size=4).map(tuple)
samplings = st.builds(
    SamplingParams,
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), floats),
    repetition_penalty=floats,
    top_k=counts,
    seed=st.integers(0, 2**64 - 1),
    choice=counts,
    logit_bias=pairs,
    logprobs=st.none() | counts,
    prompt_logprobs=st.none() | counts,
    json_schema=st.text(max_size=20),
    end_tokens=token_lists,
)
logprobs = st.builds(TokenLogprob, floats, pairs)
segments = st.builds(Segment, counts, counts, counts, token_lists, st.booleans(), st.booleans())
blocks = st.lists(st.tuples(counts, counts), max_size=3).map(tuple)
forwards = st.builds(Forward, token_lists, st.lists(segments, max_size=3).map(tuple), blocks)
swaps = st.builds(
    lambda to_host, pairs: Swap(to_host, tuple(block for block, _ in pairs), tuple(host for _, host in pairs)),
    st.booleans(),
    blocks,
)
plans = st.builds(
    IterationPlan,
    iteration=counts,
    forwards=st.lists(forwards, max_size=3).map(tuple),
    admissions=st.lists(
        st.builds(Admission, counts, token_lists, counts, samplings, counts, token_lists), max_size=3
    ).map(tuple),
    releases=token_lists,
    swaps=st.lists(swaps, max_size=3).map(tuple),
)
results = st.builds(
    IterationResult,
    counts,
    st.lists(st.integers(-1, 2**40), max_size=8).map(tuple),
    st.lists(st.tuples(counts, logprobs), max_size=3).map(tuple),
    st.lists(st.tuples(counts, st.text()), max_size=3).map(tuple),
    st.lists(floats, max_size=2).map(tuple),
    st.lists(st.lists(logprobs, max_size=3).map(tuple), max_size=2).map(tuple),
)
times = st.floats(1e-3, 3600)
promise = st.builds(Promise, times, times, st.none() | times)
promises = st.none() | promise
requests = st.builds(
    Request,
    *(st.text(), token_lists, counts, samplings, token_lists, token_lists, floats, promises),
    *(st.text(), st.text(), st.text(), times),
)
deltas = st.builds(
    Delta,
    st.text(),
    token_lists,
    st.lists(logprobs, max_size=3).map(tuple),
    st.none() | st.sampled_from(Finish),
    st.none() | st.text(),
    counts,
    st.none() | st.builds(Grant, promise, floats, st.booleans()),
    st.lists(logprobs, max_size=3).map(tuple),
)
DECODERS = (codec.decode_plan, codec.decode_result, codec.decode_requests, codec.decode_deltas)


@given(plans)
def test_plans_come_back(plan: IterationPlan) -> None:
    assert codec.decode_plan(codec.encode_plan(plan)) == plan


@given(results)
def test_results_come_back(result: IterationResult) -> None:
    assert codec.decode_result(codec.encode_result(result)) == result


@given(st.lists(requests, max_size=3))
def test_requests_come_back(batch: list[Request]) -> None:
    assert codec.decode_requests(codec.encode_requests(batch)) == tuple(batch)


@given(st.lists(deltas, max_size=3))
def test_deltas_come_back(batch: list[Delta]) -> None:
    assert codec.decode_deltas(codec.encode_deltas(batch)) == tuple(batch)


@given(st.binary(max_size=200))
def test_noise_is_a_wire_error(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(WireError):
            decode(data)


@settings(max_examples=300)
@given(plans, st.data())
def test_a_damaged_plan_is_a_wire_error_or_another_plan(plan: IterationPlan, data: st.DataObject) -> None:
    """Flipped, cut and inserted bytes: never another exception, never a value of another type."""
    raw = bytearray(codec.encode_plan(plan))
    position = data.draw(st.integers(0, len(raw) - 1))
    match data.draw(st.sampled_from(["flip", "cut", "insert"])):
        case "flip":
            raw[position] ^= data.draw(st.integers(1, 255))
        case "cut":
            del raw[position:]
        case "insert":
            raw.insert(position, data.draw(st.integers(0, 255)))
    try:
        decoded = codec.decode_plan(bytes(raw))
    except WireError:
        return
    assert isinstance(decoded, IterationPlan)


json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=300)
@given(st.sampled_from(["plan", "result", "requests", "deltas"]), json_like)
def test_a_well_formed_envelope_with_any_body_is_checked(kind: str, body: object) -> None:
    data = msgpack.packb([codec.MARK, codec.VERSION, kind, body])
    decode = {
        "plan": codec.decode_plan,
        "result": codec.decode_result,
        "requests": codec.decode_requests,
        "deltas": codec.decode_deltas,
    }[kind]
    try:
        value = decode(data)
    except WireError:
        return
    assert isinstance(value, tuple | IterationPlan | IterationResult)


def test_another_version_and_another_kind_are_named() -> None:
    plan = IterationPlan(1, ())
    body = msgpack.unpackb(codec.encode_plan(plan))
    body[1] = 99
    with pytest.raises(WireError, match="version 99, this side speaks version 7"):
        codec.decode_plan(msgpack.packb(body))
    with pytest.raises(WireError, match="kind 'plan' where 'result' was expected"):
        codec.decode_result(codec.encode_plan(plan))


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (pytest.fail, ("a pickle was loaded",))


def test_a_pickle_is_never_loaded() -> None:
    for data in (pickle.dumps(Exploit()), msgpack.packb([codec.MARK, codec.VERSION, "plan", pickle.dumps(Exploit())])):
        for decode in DECODERS:
            with pytest.raises(WireError):
                decode(data)


def test_extension_types_and_booleans_as_integers_are_refused() -> None:
    with pytest.raises(WireError):
        codec.decode_plan(msgpack.packb([codec.MARK, codec.VERSION, "plan", [msgpack.ExtType(5, b"x"), [], [], []]]))
    with pytest.raises(WireError):
        codec.decode_plan(msgpack.packb([codec.MARK, codec.VERSION, "plan", [True, [], [], []]]))


def test_infinite_logprobs_survive() -> None:
    result = IterationResult(1, (5,), ((0, TokenLogprob(-math.inf, ((3, -math.inf),))),))
    assert codec.decode_result(codec.encode_result(result)) == result
