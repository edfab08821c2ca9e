"""How long prompts and outputs are: distributions over numbers of tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random

MOST = 1 << 20
"""Tokens of one request: what is beyond any model's context is a slip of the pen."""


class Lengths(ABC):
    @abstractmethod
    def draw(self, source: Random) -> int:
        """One length in tokens, from 1 to MOST."""


@dataclass(frozen=True, slots=True)
class Fixed(Lengths):
    tokens: int

    def draw(self, source: Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform(Lengths):
    """Each length from `low` to `high`, both included, is as likely as any other."""

    low: int
    high: int

    def draw(self, source: Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal(Lengths):
    """Many short ones and a few long ones, as people's prompts are: half are below `median`; `sigma` is the standard
    deviation of the logarithm, and 1 means that one in forty is above seven times the median."""

    median: float
    sigma: float

    def draw(self, source: Random) -> int:
        exponent = min(math.log(self.median) + self.sigma * source.gauss(0, 1), math.log(MOST))
        return min(MOST, max(1, round(math.exp(exponent))))


def parse_lengths(text: str) -> Lengths:
    """`512`, `64:1024` (uniform) or `lognormal:512:0.8` (median and sigma). Raises ValueError."""
    try:
        match text.split(":"):
            case ["lognormal", median, sigma]:
                return _lognormal(float(median), float(sigma))
            case [low, high]:
                return _uniform(int(low), int(high))
            case [tokens]:
                return Fixed(_length(int(tokens)))
    except ValueError as error:
        said = str(error) if "tokens" in str(error) else "not a length"
        raise ValueError(f"{said}: {text!r}; give 512, 64:1024 or lognormal:512:0.8") from None
    raise ValueError(f"not a length: {text!r}; give 512, 64:1024 or lognormal:512:0.8")


def _uniform(low: int, high: int) -> Uniform:
    if low > high:
        raise ValueError("the fewest tokens come first")
    return Uniform(_length(low), _length(high))


def _lognormal(median: float, sigma: float) -> LogNormal:
    if not (1 <= median <= MOST and 0 <= sigma <= 10):
        raise ValueError(f"a median is 1 to {MOST:,} tokens, and sigma 0 to 10")
    return LogNormal(median, sigma)


def _length(tokens: int) -> int:
    if not 1 <= tokens <= MOST:
        raise ValueError(f"1 to {MOST:,} tokens")
    return tokens
