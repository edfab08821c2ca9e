"""Output that is JSON of a given schema: which tokens may come next, by llguidance's derivative-based lexer and Earley
parser over the tokens' bytes. No torch.

A constraint is a function of the schema and of the tokens generated so far, and of nothing else: whoever has those two
gets the same state, after a preemption, on another rank, or in another process.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from workers.constraints import GrammarError
from workers.words import in_a_line

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

ANY_OBJECT = '{"type":"object"}'
KEPT = 64
"""Compiled schemas, the ones used last."""
TRIED_TOKENS = 32
_WHITESPACE = r"(\x20|\n\x20{0,16})?"
"""Between two parts of a JSON text. Unbounded, a model that loves spaces would write nothing else."""
_FIXED: JsonCompileOptions = {"whitespace_pattern": _WHITESPACE, "lenient": False, "coerce_one_of": False}
"""What a schema's own `x-guidance` cannot change: nothing that it asks for is left out."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,
    max_items_in_row=20_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""Tens of milliseconds for a schema, several for a token; counted in steps, so that every process refuses the same."""
_IN_OTHER_WORDS = {
    "NoExtensionBias": "a part of it is nothing but a reference to itself",
    "oneOf constraints are not supported": "oneOf is only understood where no two of its parts can fit the same",
}
"""What the library says of a schema to who wrote its grammar, or may set its options."""


class Grammars:
    """Of one tokenizer, given as its `tokenizer.json`. May be used from several threads. `vocab_size` is that of the
    model's logits."""

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        try:
            self._tokenizer = LLTokenizer(tokenizer_json)
            if self._tokenizer.vocab_size < vocab_size:
                self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size)
        except Exception as error:  # of a library that raises whatever it likes
            raise GrammarError(f"the tokenizer cannot be used for structured output: {in_a_line(error)}") from None
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    @classmethod
    def load(cls, model_dir: str | Path, vocab_size: int) -> Grammars:
        """Of a local checkpoint. Raises GrammarError."""
        try:
            content = (Path(model_dir) / "tokenizer.json").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GrammarError(f"the tokenizer cannot be used for structured output: {in_a_line(error)}") from None
        return cls(content, vocab_size)

    def check(self, schema: str) -> None:
        """Compile it, and generate some of it, as an object, an array, a string and what comes: one that takes too long
        where an answer would be is not begun. Raises GrammarError."""
        for opening in ("{", "[", '"', ""):
            constraint, tokens = self.start(schema, ()), self._tokenizer.tokenize_str(opening)[:1]
            if tokens and not constraint.allowed(())[tokens].all():
                continue
            for step in range(TRIED_TOKENS):
                (choices,) = constraint.allowed(tokens).nonzero()
                if not len(choices):
                    break
                tokens.append(int(choices[(step * 7919) % len(choices)]))  # any of them, but the same each time

    def start(self, schema: str, end_tokens: Sequence[int]) -> Constraint:
        """Of one sequence that is to be JSON of that schema (a JSON text), and then one of the `end_tokens`. Raises
        GrammarError."""
        with self._lock:
            compiled = self._compiled.get(schema)
            if compiled is None:
                compiled = self._compile(schema)
                self._compiled[schema] = compiled
                while len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(schema)
            return Constraint(compiled.deep_copy(), end_tokens, self.vocab_size)

    def _compile(self, schema: str) -> LLMatcher:
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_FIXED)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        except Exception as error:
            raise GrammarError(_of_schema(error)) from None
        if matcher.is_error():
            raise GrammarError(_of_schema(matcher.get_error()))
        first = matcher.deep_copy()
        first.compute_bitmask()  # one that nothing can begin with shows only now
        if first.is_error():
            raise GrammarError(_of_schema(first.get_error()))
        return matcher


class Constraint:
    """Of one sequence: `allowed` is asked before each token, with all that were generated before it."""

    def __init__(self, matcher: LLMatcher, end_tokens: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._ends = np.array(sorted(set(end_tokens)), dtype=np.int64)
        self._end_set = frozenset(end_tokens)
        self._vocab_size = vocab_size
        self._taken = 0

    def allowed(self, generated: Sequence[int] | NDArray[np.int32]) -> NDArray[np.bool_]:
        """[vocab]: which tokens may come after those generated. Raises GrammarError where these are no beginning of
        such a text, or telling would take too long."""
        for token in generated[self._taken :]:
            self._take(int(token))
        self._taken = len(generated)
        mask = np.zeros(self._vocab_size, dtype=np.bool_)
        if not self._matcher.is_stopped():
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(packed, bitorder="little")[: self._vocab_size]
            mask[: len(bits)] = bits
        if self._matcher.is_error():
            raise GrammarError(in_a_line(self._matcher.get_error()))
        mask[self._ends] = self._matcher.is_accepting()
        return mask

    def _take(self, token: int) -> None:
        """What comes after the end is dropped by whoever reads it; here it changes nothing."""
        if token in self._end_set or self._matcher.is_stopped():
            return
        if not self._matcher.consume_token(token):
            raise GrammarError(f"token {token} does not fit: {in_a_line(self._matcher.get_error())}")


def _of_schema(error: object) -> str:
    said = in_a_line(error)
    return next((words for beginning, words in _IN_OTHER_WORDS.items() if said.startswith(beginning)), said)


def canonical(schema: dict[str, Any]) -> str:
    """A schema as one text, its properties in their order, which is the order in which they are generated. Raises
    ValueError for numbers that JSON has not, and RecursionError for what is nested too deeply."""
    return json.dumps(schema, separators=(",", ":"), allow_nan=False)
