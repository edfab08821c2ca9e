"""Plans that were made and have not been answered yet."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.plan import IterationResult
from scheduler.prefixes import Written
from scheduler.progress import InFlight
from scheduler.request import Sequence


class UnderWay:
    """Of one scheduler, by iteration, in the order in which they were made."""

    __slots__ = ("_plans",)

    def __init__(self) -> None:
        self._plans: dict[int, InFlight] = {}

    def __iter__(self) -> Iterator[InFlight]:
        return iter(self._plans.values())

    def __getitem__(self, iteration: int) -> InFlight:
        """Raises KeyError for no such plan."""
        return self._plans[iteration]

    def add(self, iteration: int, plan: InFlight) -> None:
        self._plans[iteration] = plan

    def answered(self, result: IterationResult) -> InFlight:
        """The plan that a result is the answer to, which is not under way any more. Raises ValueError where there is
        none, or one that it does not match."""
        plan = self._plans.pop(result.iteration, None)
        if plan is None:
            raise ValueError(f"result of iteration {result.iteration}, which is not under way")
        sampled, scored = len(plan.sampling), len(plan.scored)
        if sampled != len(result.tokens):
            raise ValueError(f"{len(result.tokens)} tokens where iteration {result.iteration} samples {sampled}")
        if scored != len(result.prompt_logprobs):
            raise ValueError(f"{len(result.prompt_logprobs)} prompts' chunks scored where {scored} were to be")
        return plan

    def is_past(self, iteration: int) -> bool:
        """Whether everything that was made up to that plan has been answered."""
        return next(iter(self._plans), iteration + 1) > iteration

    @property
    def filling(self) -> list[Written]:
        """The blocks that will be full."""
        return [entry for plan in self for entry in plan.written]

    def written(self, sequence: Sequence) -> int:
        """Of the tokens that are booked as computed for a sequence, those whose KV has been written."""
        offsets = [chunk.offset for plan in self for chunk in plan.chunks if chunk.request_id == sequence.request_id]
        return min(offsets, default=sequence.computed)

    def clear(self) -> None:
        """Nobody will answer them."""
        self._plans.clear()
