"""Prompts of a simulation: token ids that say which prompts are alike, and cost nothing to make."""

from __future__ import annotations

from cluster.simulated.machine import VOCABULARY
from cluster.workloads import PlannedRequest, RandomPrompt

_OWN = VOCABULARY // 2
"""Ids from here on belong to one request alone; those below to blocks that several may begin with."""


def prompt_tokens(planned: PlannedRequest, number: int, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    """As many ids as the plan has tokens. Prompts share ids exactly where they were planned to share a prefix.

    A small `vocabulary` (of a calibrated engine) makes ids meet by chance. Raises ValueError for text, whose tokens
    only a tokenizer knows.
    """
    prompt = planned.prompt
    if isinstance(prompt, str):
        raise ValueError("a simulated request needs token ids or a number of tokens, not text")
    if not isinstance(prompt, RandomPrompt):
        return tuple(prompt)
    own = (_OWN + number) % vocabulary
    if not prompt.blocks:
        return (own,) * prompt.tokens
    shared = [block % min(_OWN, vocabulary) for block in prompt.blocks for _ in range(prompt.block_tokens)]
    return (*shared[: prompt.tokens], *(own,) * (prompt.tokens - len(shared)))
