"""Promises of latency and the deadlines that follow from them. All times are seconds of the injected clock.

A request's first token is due at arrival + TTFT; its token j (counted from 0) at first-token time + j x TPOT, so that a
stream that is ahead lends its slack to others. An optional `tbt` bounds each single gap as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

LONGEST_PROMISE_S = 24 * 3600.0
SHORTEST_PROMISE_S = 1e-6
"""That a request or an operator may ask for: less rounds to nothing in what is computed with it."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What a request was promised. `tbt_s` None: single gaps are not bounded. Raises ValueError for what is no time."""

    ttft_s: float
    tpot_s: float
    tbt_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s), ("tbt", self.tbt_s)):
            if value is not None and not (math.isfinite(value) and 0 < value <= LONGEST_PROMISE_S):
                raise ValueError(f"{name} must be above 0 and at most {LONGEST_PROMISE_S:.0f} s, got {value}")

    def first_token_due(self, arrival: float) -> float:
        return arrival + self.ttft_s

    def token_due(self, index: int, first_token_at: float, last_token_at: float) -> float:
        """When token `index` (the first is 0) is due, given when the first and the latest token came."""
        due = first_token_at + index * self.tpot_s
        return due if self.tbt_s is None else min(due, last_token_at + self.tbt_s)

    @property
    def pace_s(self) -> float:
        """What bounds a steady stream's gap while a prompt is prefilled: savings do not last a long prompt."""
        return self.tpot_s if self.tbt_s is None else min(self.tpot_s, self.tbt_s)

    def stretched(self, factor: float) -> Promise:
        """The same promise with every time `factor` as long, between the shortest and the longest there are."""

        def stretch(value: float) -> float:
            return min(max(value * factor, SHORTEST_PROMISE_S), LONGEST_PROMISE_S)

        return Promise(stretch(self.ttft_s), stretch(self.tpot_s), None if self.tbt_s is None else stretch(self.tbt_s))


DEFAULT_CLASS, CUSTOM_CLASS, BEST_EFFORT_CLASS = OWN_CLASSES = ("default", "custom", "best_effort")
"""Under which requests without a class are counted: those that asked for nothing, those with numbers of their own, and
those whose promise was given up at admission."""

UNPROMISED = Promise(ttft_s=LONGEST_PROMISE_S, tpot_s=LONGEST_PROMISE_S)
"""What a server without a default promises: nothing it can do is late."""


class UnknownClass(ValueError):
    """A class of service that is not defined; the message names those that are."""


@dataclass(frozen=True, slots=True)
class PromiseBook:
    """What a server promises: a default by the prompt's length in tokens, and classes by name.

    A class is a promise of its own, or a factor on the default's times.
    """

    default: Callable[[int], Promise] = lambda prompt_tokens: UNPROMISED
    classes: Mapping[str, Promise | float] = field(default_factory=dict)

    def promise(self, prompt_tokens: int, slo_class: str = "") -> Promise:
        """Raises UnknownClass."""
        if not slo_class:
            return self.default(prompt_tokens)
        if slo_class not in self.classes:
            known = ", ".join(self.classes) or "none is defined"
            raise UnknownClass(f"unknown service class {slo_class!r}; known: {known}")
        meant = self.classes[slo_class]
        return meant if isinstance(meant, Promise) else self.default(prompt_tokens).stretched(meant)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a request gets instead of what it was to be promised, since that was predicted to be missed.

    `promise` is what holds now. `best_effort`: its first token comes when nobody else's is at risk for it.
    """

    promise: Promise
    predicted_ttft_s: float
    best_effort: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a finished request fared. `tpot_s` is None for a request of one token, which cannot miss it."""

    ttft_s: float
    tpot_s: float | None
    largest_gap_s: float | None
    promise: Promise

    @property
    def ttft_met(self) -> bool:
        return self.ttft_s <= self.promise.ttft_s

    @property
    def tpot_met(self) -> bool:
        gap_met = self.promise.tbt_s is None or self.largest_gap_s is None or self.largest_gap_s <= self.promise.tbt_s
        return gap_met and (self.tpot_s is None or self.tpot_s <= self.promise.tpot_s)

    @property
    def met(self) -> bool:
        return self.ttft_met and self.tpot_met
