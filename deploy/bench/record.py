"""What was seen of each request of a run, on one clock. Seconds from the run's start."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

from deploy.bench.slo import SloTargets


class Outcome(StrEnum):
    """`unfinished`: still under way, or not yet sent, when the run was interrupted; it counts neither way."""

    FINISHED = "finished"
    FAILED = "failed"
    UNFINISHED = "unfinished"


class CountedBy(StrEnum):
    """How tokens were told apart. `token_ids` and `usage` (continuous) are exact; with `chunks` each chunk with text is
    taken for one token; with `final_usage` the server's total was spread over the chunks."""

    TOKEN_IDS = "token_ids"
    USAGE = "usage"
    CHUNKS = "chunks"
    FINAL_USAGE = "final_usage"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. `tokens` has one time for each; those of one chunk share it. `prompt_tokens` is the server's count
    where it told one, and the planned number otherwise. `error` is the kind of what went wrong, `message` its words.
    `left`: the reader went away by itself, having seen enough; such a request is finished. `slo`: what was promised to
    it alone; None where the run's promise holds."""

    kind: str
    due_s: float
    sent_s: float
    tokens: tuple[float, ...]
    ended_s: float
    prompt_tokens: int | None
    asked_tokens: int
    outcome: Outcome
    counted_by: CountedBy | None = None
    error: str | None = None
    message: str = ""
    left: bool = False
    slo: SloTargets | None = None

    @property
    def late_s(self) -> float:
        """How much later than planned this client sent it."""
        return self.sent_s - self.due_s

    @property
    def ttft_s(self) -> float | None:
        return self.tokens[0] - self.sent_s if self.tokens else None

    @property
    def tpot_s(self) -> float | None:
        """(last - first) / (tokens - 1); None below two tokens."""
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None

    @property
    def second_token_s(self) -> float | None:
        """From sending to the second token, which comes late where a prompt's KV goes elsewhere after the first."""
        return self.tokens[1] - self.sent_s if len(self.tokens) > 1 else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.tokens)]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as it was: `requests` in order of sending, the warm-up's not among them. `started_at` is Unix time.
    `open_loop`: requests had a due time, so lateness means something. `facts` say what was driven and how."""

    requests: tuple[RequestRecord, ...]
    duration_s: float
    started_at: float
    open_loop: bool
    interrupted: bool = False
    planned: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
