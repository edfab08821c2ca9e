"""A request's promise: numbers or the name of a class, in the body's `slo` or in the header X-SLO."""

from __future__ import annotations

import json
import math
from typing import Any

from deploy.api.errors import bad_request, shorten
from deploy.api.schemas import Sampling, SloNumbers, parse_slo
from scheduler.slo import LONGEST_PROMISE_S, Grant, Promise

HEADER = "x-slo"
GRANTED_HEADER = "x-slo-granted"


def asked_for(body: Sampling, header: str | None) -> tuple[Promise | None, str]:
    """The promise, or the name of a class; neither where the server's default is wanted. The body wins over the header.

    Raises ApiError for what is no promise.
    """
    slo = body.slo if body.slo is not None else _from_header(header)
    if slo is None:
        return None, ""
    if isinstance(slo, str):
        if not slo or len(slo) > 64:
            raise bad_request(f"slo: {shorten(repr(slo))} is no name of a class", "slo")
        return None, slo
    tbt = None if slo.tbt_ms is None else slo.tbt_ms / 1e3
    return Promise(slo.ttft_ms / 1e3, slo.tpot_ms / 1e3, tbt), ""


def described(grant: Grant) -> dict[str, Any]:
    """What a client is told of a promise that could not be given as it was asked for. Times in milliseconds."""
    promise = grant.promise
    told: dict[str, Any] = {
        "ttft_ms": None if grant.best_effort and promise.ttft_s >= LONGEST_PROMISE_S else ms(promise.ttft_s),
        "tpot_ms": ms(promise.tpot_s),
        "tbt_ms": None if promise.tbt_s is None else ms(promise.tbt_s),
    }
    return {**told, "predicted_ttft_ms": ms(grant.predicted_ttft_s), "best_effort": grant.best_effort}


def ms(seconds: float) -> int:
    return math.ceil(seconds * 1e3)


def _from_header(header: str | None) -> str | SloNumbers | None:
    """A class name, or the same object as in the body, as JSON."""
    if header is None or not header.lstrip().startswith("{"):
        return None if header is None else header.strip()
    try:
        value: Any = json.loads(header)
    except (ValueError, RecursionError):
        raise bad_request(f"the header X-SLO holds no JSON: {shorten(header)}", "slo") from None
    return parse_slo(value)
