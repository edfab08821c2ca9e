"""The constraints of a worker's slots. Schemas are compiled on a thread, while the prompt is being computed; what
compiles them is imported when the first one comes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scheduler.sampling import SamplingParams

if TYPE_CHECKING:
    from workers.grammar import Constraint, Grammars


class GrammarError(ValueError):
    """A schema that cannot be compiled, or a model whose tokens nobody can tell. The message is one line."""


class Constraints:
    """By slot, of the model in a local directory, whose logits are of `vocab_size`."""

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        self._model_dir, self._vocab_size = model_dir, vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._of_slot: dict[int, Future[Constraint]] = {}

    def admit(self, slot: int, params: SamplingParams) -> None:
        """Returns at once."""
        self.release(slot)
        if params.json_schema:
            self._of_slot[slot] = self._thread.submit(self._start, params)

    def release(self, slot: int) -> None:
        self._of_slot.pop(slot, None)

    def allowed(self, slot: int, generated: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """[vocab] of a slot whose sequence has generated so much; None where any token will do. Raises GrammarError."""
        found = self._of_slot.get(slot)
        return None if found is None else found.result().allowed(generated)

    def _start(self, params: SamplingParams) -> Constraint:
        return self._grammars.start(params.json_schema, params.end_tokens)

    @cached_property
    def _grammars(self) -> Grammars:
        from workers.grammar import Grammars

        return Grammars.load(self._model_dir, self._vocab_size)
