"""The token budget: how many prompt tokens one iteration may carry. An injected object, so that changing it means
writing one class and never copying the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler.request import Sequence


class Batch(NamedTuple):
    """What a policy and a budget see: of the running sequences the prompts and the streams that want something
    (`prefilling`, `decodable`), oldest first, and the time (seconds, injected clock)."""

    prefills: Seq[Sequence]
    decodes: Seq[Sequence]
    now: float


class Decision(NamedTuple):
    """Why an iteration carries what it carries.

    `token_budget` are prompt tokens. `bound` names what kept it from being larger: `deadline` (a stream's next token),
    `first_token` (of a prompt that the iteration completes), `newcomers` (who would wait for its end), `cap`
    (max_batched_tokens), `prompts` (there are no more prompt tokens), `progress` (the minimum, against all deadlines),
    `static` (the operator's number), `whole`, or `none` where no prompt wants anything. `allowed_s` is the time until
    the tightest token is due, and `tightest` the stream whose token that is; None where nothing is due.
    """

    token_budget: int = 0
    bound: str = "none"
    allowed_s: float | None = None
    tightest: str | None = None


NOTHING_WANTED = Decision()


class TokenBudget(Protocol):
    """Prompt tokens for one iteration that also carries every decode of the batch, with the reason. Never negative."""

    def decide(self, batch: Batch) -> Decision: ...


@dataclass(frozen=True, slots=True)
class StaticBudget:
    """The same chunk in every iteration, chosen by the operator. Raises ValueError for less than one token."""

    chunk_size: int

    def __post_init__(self) -> None:
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {self.chunk_size}")

    def decide(self, batch: Batch) -> Decision:
        return Decision(self.chunk_size, "static")
