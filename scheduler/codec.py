"""Messages as bytes: msgpack arrays of plain values behind a mark, a version and a kind.

Decoding builds only our own frozen types from ints, floats, strings and lists: no code is run and no type is named by
the sender. Anything else (truncated, foreign, another version, a float where an int belongs) is a WireError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

import msgpack

from scheduler.errors import WireError
from scheduler.plan import Admission, Forward, IterationPlan, IterationResult, Segment, Swap
from scheduler.request import Delta, Finish, Request, TokenLogprob
from scheduler.sampling import SamplingParams
from scheduler.slo import Grant, Promise

MARK = "stallfree"
VERSION = 7

T = TypeVar("T")


def encode_plan(plan: IterationPlan) -> bytes:
    return _pack("plan", _plan_fields(plan))


def decode_plan(data: bytes) -> IterationPlan:
    """Raises WireError."""
    return _unpack(data, "plan", _plan)


def encode_result(result: IterationResult) -> bytes:
    return _pack("result", _result_fields(result))


def decode_result(data: bytes) -> IterationResult:
    """Raises WireError."""
    return _unpack(data, "result", _result)


def encode_requests(requests: Iterable[Request]) -> bytes:
    return _pack("requests", [_request_fields(r) for r in requests])


def decode_requests(data: bytes) -> tuple[Request, ...]:
    """Raises WireError."""
    return _unpack(data, "requests", lambda body: tuple(_request(x) for x in _list(body)))


def encode_deltas(deltas: Iterable[Delta]) -> bytes:
    return _pack("deltas", [_delta_fields(d) for d in deltas])


def decode_deltas(data: bytes) -> tuple[Delta, ...]:
    """Raises WireError."""
    return _unpack(data, "deltas", lambda body: tuple(_delta(x) for x in _list(body)))


# The envelope.


def _pack(kind: str, body: list[Any]) -> bytes:
    packed: bytes = msgpack.packb([MARK, VERSION, kind, body], use_bin_type=True)
    return packed


def _unpack(data: bytes, kind: str, build: Callable[[Any], T]) -> T:
    try:
        message = msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True)
    except Exception as error:  # msgpack raises half a dozen unrelated types for malformed input
        raise WireError(f"not a msgpack message: {error or type(error).__name__}") from None
    if not isinstance(message, list) or len(message) != 4 or message[0] != MARK:
        raise WireError("not a message of this system")
    if type(message[1]) is not int or message[1] != VERSION:
        raise WireError(f"message of version {message[1]!r}, this side speaks version {VERSION}")
    if message[2] != kind:
        raise WireError(f"message of kind {message[2]!r} where {kind!r} was expected")
    return build(message[3])


# Each type as a list of its fields, and back.


def _plan_fields(plan: IterationPlan) -> list[Any]:
    return [
        plan.iteration,
        list(plan.releases),
        [_admission_fields(a) for a in plan.admissions],
        [_forward_fields(f) for f in plan.forwards],
        [[s.to_host, list(s.blocks), list(s.host_blocks)] for s in plan.swaps],
    ]


def _plan(body: Any) -> IterationPlan:
    iteration, releases, admissions, forwards, swaps = _fields(body, 5, "plan")
    return IterationPlan(
        iteration=_count(iteration),
        releases=_counts(releases),
        admissions=tuple(_admission(a) for a in _list(admissions)),
        forwards=tuple(_forward(f) for f in _list(forwards)),
        swaps=tuple(_swap(s) for s in _list(swaps)),
    )


def _forward_fields(f: Forward) -> list[Any]:
    chunks = [[s.slot, s.start, s.count, list(s.new_blocks), s.sample, s.score] for s in f.chunks]
    return [list(f.decodes), chunks, [list(pair) for pair in f.new_blocks]]


def _forward(body: Any) -> Forward:
    decodes, chunks, new_blocks = _fields(body, 3, "forward")
    pairs = (_fields(x, 2, "new block") for x in _list(new_blocks))
    return Forward(
        decodes=_counts(decodes),
        chunks=tuple(_segment(s) for s in _list(chunks)),
        new_blocks=tuple((_count(slot), _count(block)) for slot, block in pairs),
    )


def _admission_fields(a: Admission) -> list[Any]:
    return [a.slot, list(a.tokens), a.prompt_tokens, _sampling_fields(a.sampling), a.computed, list(a.blocks)]


def _swap(body: Any) -> Swap:
    to_host, blocks, host_blocks = _fields(body, 3, "swap")
    swap = Swap(_bool(to_host), _counts(blocks), _counts(host_blocks))
    return swap if len(swap.blocks) == len(swap.host_blocks) else _refuse("a host block for each block", host_blocks)


def _admission(body: Any) -> Admission:
    slot, tokens, prompt_tokens, sampling, computed, blocks = _fields(body, 6, "admission")
    return Admission(
        _count(slot), _counts(tokens), _count(prompt_tokens), _sampling(sampling), _count(computed), _counts(blocks)
    )


def _segment(body: Any) -> Segment:
    slot, start, count, new_blocks, sample, score = _fields(body, 6, "segment")
    return Segment(_count(slot), _count(start), _count(count), _counts(new_blocks), _bool(sample), _bool(score))


def _sampling_fields(p: SamplingParams) -> list[Any]:
    return [
        *(p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.choice),
        *(p.presence_penalty, p.frequency_penalty, p.repetition_penalty),
        [list(pair) for pair in p.logit_bias],
        *(p.logprobs, p.prompt_logprobs, p.json_schema, list(p.end_tokens)),
    ]


def _sampling(body: Any) -> SamplingParams:
    f = _fields(body, 14, "sampling parameters")
    bias = tuple((_count(token), _float(value)) for token, value in (_fields(x, 2, "bias") for x in _list(f[9])))
    return SamplingParams(
        temperature=_float(f[0]),
        top_k=_count(f[1]),
        top_p=_float(f[2]),
        min_p=_float(f[3]),
        seed=_count(f[4]),
        choice=_count(f[5]),
        presence_penalty=_float(f[6]),
        frequency_penalty=_float(f[7]),
        repetition_penalty=_float(f[8]),
        logit_bias=bias,
        logprobs=None if f[10] is None else _count(f[10]),
        prompt_logprobs=None if f[11] is None else _count(f[11]),
        json_schema=_str(f[12]),
        end_tokens=_counts(f[13]),
    )


def _result_fields(r: IterationResult) -> list[Any]:
    return [
        *(r.iteration, list(r.tokens)),
        [[index, _logprob_fields(p)] for index, p in r.logprobs],
        [list(pair) for pair in r.errors],
        list(r.forward_s),
        [[_logprob_fields(p) for p in chunk] for chunk in r.prompt_logprobs],
    ]


def _result(body: Any) -> IterationResult:
    iteration, tokens, logprobs, errors, forward_s, prompts = _fields(body, 6, "result")
    return IterationResult(
        iteration=_count(iteration),
        tokens=_ints(tokens),
        logprobs=tuple((_count(i), _logprob(p)) for i, p in (_fields(x, 2, "logprob") for x in _list(logprobs))),
        errors=tuple((_count(i), _str(text)) for i, text in (_fields(x, 2, "error") for x in _list(errors))),
        forward_s=tuple(_float(x) for x in _list(forward_s)),
        prompt_logprobs=tuple(_logprobs(chunk) for chunk in _list(prompts)),
    )


def _logprob_fields(p: TokenLogprob) -> list[Any]:
    return [p.logprob, [list(pair) for pair in p.top]]


def _logprob(body: Any) -> TokenLogprob:
    logprob, top = _fields(body, 2, "logprob")
    pairs = (_fields(x, 2, "alternative") for x in _list(top))
    return TokenLogprob(_float(logprob), tuple((_count(token), _float(value)) for token, value in pairs))


def _logprobs(body: Any) -> tuple[TokenLogprob, ...]:
    return tuple(_logprob(p) for p in _list(body))


def _request_fields(r: Request) -> list[Any]:
    return [
        *(r.request_id, list(r.prompt), r.max_tokens, _sampling_fields(r.sampling)),
        *(list(r.stop_token_ids), list(r.produced), r.age_s),
        None if r.promise is None else _promise_fields(r.promise),
        *(r.slo_class, r.cache_salt, r.tenant, r.weight),
    ]


def _request(body: Any) -> Request:
    f = _fields(body, 12, "request")
    weight = _float(f[11])
    if not 0 < weight < float("inf"):
        raise WireError(f"a weight of {weight}")
    return Request(
        request_id=_str(f[0]),
        prompt=_counts(f[1]),
        max_tokens=_count(f[2]),
        sampling=_sampling(f[3]),
        stop_token_ids=_counts(f[4]),
        produced=_counts(f[5]),
        age_s=_float(f[6]),
        promise=None if f[7] is None else _promise(f[7]),
        slo_class=_str(f[8]),
        cache_salt=_str(f[9]),
        tenant=_str(f[10]),
        weight=weight,
    )


def _promise_fields(p: Promise) -> list[Any]:
    return [p.ttft_s, p.tpot_s, p.tbt_s]


def _promise(body: Any) -> Promise:
    ttft, tpot, tbt = _fields(body, 3, "promise")
    try:
        return Promise(_float(ttft), _float(tpot), None if tbt is None else _float(tbt))
    except ValueError as error:
        raise WireError(str(error)) from None


def _grant_fields(g: Grant) -> list[Any]:
    return [_promise_fields(g.promise), g.predicted_ttft_s, g.best_effort]


def _grant(body: Any) -> Grant:
    promise, predicted, best_effort = _fields(body, 3, "grant")
    return Grant(_promise(promise), _float(predicted), _bool(best_effort))


def _delta_fields(d: Delta) -> list[Any]:
    return [
        *(d.request_id, list(d.tokens), [_logprob_fields(p) for p in d.logprobs]),
        *(None if d.finish is None else d.finish.value, d.reason, d.cached_tokens),
        None if d.grant is None else _grant_fields(d.grant),
        [_logprob_fields(p) for p in d.prompt_logprobs],
    ]


def _delta(body: Any) -> Delta:
    request_id, tokens, logprobs, finish, reason, cached, grant, prompt = _fields(body, 8, "delta")
    return Delta(
        request_id=_str(request_id),
        tokens=_counts(tokens),
        logprobs=_logprobs(logprobs),
        finish=None if finish is None else _finish(finish),
        reason=_optional_str(reason),
        cached_tokens=_count(cached),
        grant=None if grant is None else _grant(grant),
        prompt_logprobs=_logprobs(prompt),
    )


def _finish(value: Any) -> Finish:
    try:
        return Finish(value)
    except ValueError:
        _refuse("a finish reason", value)


# Checked leaves. bool is an int to Python but not here.


def _refuse(wanted: str, value: Any) -> NoReturn:
    raise WireError(f"expected {wanted}, got {str(value)[:40]!r}")


def _fields(value: Any, count: int, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != count:
        _refuse(f"{count} fields of a {what}", value)
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else _refuse("a list", value)


def _ints(value: Any) -> tuple[int, ...]:
    column = tuple(_list(value))
    if not set(map(type, column)) <= {int}:  # for columns of thousands: no step of the interpreter per element
        _refuse("integers", value)
    return column


def _count(value: Any) -> int:
    return value if type(value) is int and value >= 0 else _refuse("a non-negative integer", value)


def _counts(value: Any) -> tuple[int, ...]:
    column = _ints(value)
    return column if min(column, default=0) >= 0 else _refuse("non-negative integers", value)


def _float(value: Any) -> float:
    return float(value) if type(value) in (float, int) else _refuse("a number", value)


def _bool(value: Any) -> bool:
    return value if type(value) is bool else _refuse("true or false", value)


def _str(value: Any) -> str:
    return value if type(value) is str else _refuse("a string", value)


def _optional_str(value: Any) -> str | None:
    return None if value is None else _str(value)
