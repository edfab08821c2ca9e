"""Tokens that have to be JSON of a schema, on one worker: the same whatever goes on beside them, and however often they
begin anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from jsonschema import validate

from scheduler.sampling import SamplingParams
from tests.workers.driver import GREEDY, driver_on, loaded
from workers.constraints import GrammarError
from workers.grammar import ANY_OBJECT, Grammars, canonical
from workers.tokenizer import Tokenizer
from workers.worker import Worker

END = 2
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "of": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3}},
    "required": ["on", "of"],
    "additionalProperties": False,
}
PROMPT = tuple(range(3, 60))


def constrained(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, json_schema=canonical(SCHEMA), end_tokens=(END,))


@pytest.fixture(scope="module")
def worker(tiny_model_dir: Path) -> Iterator[Worker]:
    worker = loaded(tiny_model_dir, 100)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.as_json or "", 49152)


def alone(worker: Worker, seed: int, count: int = 40) -> list[int]:
    driver = driver_on(worker)
    driver.admit(0, PROMPT, constrained(seed))
    return driver.generate(0, count, 100)


def test_a_random_model_writes_what_fits(worker: Worker, tokenizer: Tokenizer) -> None:
    for seed in range(8):
        tokens = alone(worker, seed, 200)
        end = tokens.index(END)
        validate(json.loads(tokenizer.decode(tokens[:end])), SCHEMA)
        assert set(tokens[end:]) == {END}, "and then nothing but the end"


def test_the_same_in_chunks_and_beside_others(worker: Worker) -> None:
    expected = [alone(worker, seed) for seed in range(3)]
    free = driver_on(worker)
    free.admit(3, PROMPT, SamplingParams(seed=9))
    unconstrained = free.generate(3, 20, 100)
    driver = driver_on(worker)
    driver.admit(3, PROMPT, SamplingParams(seed=9))
    for seed in range(3):
        driver.admit(seed, PROMPT, constrained(seed))
    for start in range(0, len(PROMPT), 10):
        driver.step({slot: min(10, len(PROMPT) - start) for slot in range(4)})
    for _ in range(19):
        driver.step(dict.fromkeys(range(4), 1))
    assert [driver.tokens[slot][len(PROMPT) :] for slot in range(3)] == [tokens[:20] for tokens in expected]
    assert driver.tokens[3][len(PROMPT) :] == unconstrained


@pytest.mark.parametrize("given", [0, 1, 5, 30])
def test_one_that_begins_anew_goes_on_where_it_was(worker: Worker, given: int) -> None:
    """Preempted, moved to another group, or given again after a loss: from its tokens alone."""
    expected = alone(worker, 4)
    driver = driver_on(worker)
    driver.admit(0, PROMPT, GREEDY)
    driver.generate(0, 2, 100)
    driver.release(0)  # whatever was in that slot before
    driver.admit(0, (*PROMPT, *expected[:given]), constrained(4), prompt=len(PROMPT))
    assert driver.generate(0, 40 - given, 7) == expected[given:]


def test_what_cannot_be_compiled_is_an_error_of_its_row(worker: Worker) -> None:
    driver = driver_on(worker)
    driver.admit(0, PROMPT, SamplingParams(json_schema='{"type":"nope"}', end_tokens=(END,)))
    driver.admit(1, PROMPT, GREEDY)
    result = driver.step({0: len(PROMPT), 1: len(PROMPT)})
    ((index, said),) = result.errors
    assert index == 0
    assert "nope" in said
    assert result.tokens[1] >= 0


def test_tokens_that_do_not_fit_are_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.start(ANY_OBJECT, (END,))
    with pytest.raises(GrammarError, match="does not fit"):
        constraint.allowed(tokenizer.encode("Sorry"))


def test_a_state_is_that_of_the_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode('{"on": true, "of": ["a", "bc"]}')
    step_by_step = grammars.start(canonical(SCHEMA), (END,))
    for count in range(len(tokens) + 1):
        mask = step_by_step.allowed(tokens[:count])
        at_once = grammars.start(canonical(SCHEMA), (END,)).allowed(np.array(tokens[:count], dtype=np.int32))
        assert (mask == at_once).all()
        assert count == len(tokens) or mask[tokens[count]]
        assert mask[END] == (count == len(tokens))


def test_special_tokens_are_no_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A model must not end its turn, or begin another's, within a string."""
    mask = grammars.start(ANY_OBJECT, (END,)).allowed(tokenizer.encode('{"a": "b'))
    assert not mask[sorted(tokenizer.special_ids)].any()


def test_a_schema_cannot_loosen_itself(grammars: Grammars) -> None:
    schema = {"type": "string", "x-guidance": {"lenient": True, "whitespace_pattern": ".*"}}
    with pytest.raises(GrammarError, match="not"):
        grammars.check(canonical({**schema, "not": {}}))
    assert not grammars.start(canonical(schema), (END,)).allowed(())[[ord("a")]].any()


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="tokenizer"):
        Grammars.load(tmp_path, 512)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(GrammarError, match="tokenizer"):
        Grammars.load(tmp_path, 512)
