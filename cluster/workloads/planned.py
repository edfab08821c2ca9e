"""A planned request, and the three ways in which many of them follow each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.workloads.prompts import RandomPrompt

Prompt = str | Sequence[int] | RandomPrompt
"""Text and token ids are sent as they are; a RandomPrompt becomes whichever of the two the server takes."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """`output_tokens` are asked for at most. `at_s` is when it is due, in seconds from the start; a closed loop does
    not look at it. `extra` goes into the request's body as it is, such as {"slo": {...}}. Figures are also given for
    each `kind` by itself."""

    prompt: Prompt
    output_tokens: int
    at_s: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "request"

    def __post_init__(self) -> None:
        if self.output_tokens < 1:
            raise ValueError(f"output_tokens must be at least 1, got {self.output_tokens}")
        if not (math.isfinite(self.at_s) and self.at_s >= 0):
            raise ValueError(f"at_s must be a time from 0 on, got {self.at_s}")

    @property
    def prompt_tokens(self) -> int | None:
        """None for text: only the server's tokenizer knows."""
        if isinstance(self.prompt, str):
            return None
        return self.prompt.tokens if isinstance(self.prompt, RandomPrompt) else len(self.prompt)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Each request is sent when it is due, whatever became of the others. In order of `at_s`."""

    requests: Sequence[PlannedRequest]

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", tuple(sorted(self.requests, key=lambda request: request.at_s)))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests are always under way; the next one is sent when one of them ends."""

    requests: Sequence[PlannedRequest]
    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")


@dataclass(frozen=True, slots=True)
class Interference:
    """Streams that decode, and one `long` prompt into them: it is sent once each stream has had `lead` tokens, and the
    reader of a stream leaves `tail` tokens after the long request has ended. So the streams outlast it, however long
    it takes, if only their `output_tokens` are enough."""

    streams: Sequence[PlannedRequest]
    long: PlannedRequest
    lead: int = 20
    tail: int = 24

    def __post_init__(self) -> None:
        if not self.streams or self.lead < 1 or self.tail < 0:
            raise ValueError("interference needs a stream, a lead of at least 1 and a tail of at least 0 tokens")

    @property
    def requests(self) -> Sequence[PlannedRequest]:
        return (*self.streams, self.long)


Workload = OpenLoop | ClosedLoop | Interference
