"""How the next token of one sequence is chosen: plain numbers, checked once, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_LOGPROBS = 20
"""Most alternatives a client may ask for at one position (OpenAI's bound for chat)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one sequence.

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 switch the respective filter off. Random numbers are
    keyed by (seed, choice, position), so that neither batch nor chunking nor preemption can change a token.
    `logprobs` is None for none, or the number of alternatives (0: only the chosen token's); `prompt_logprobs` the same
    for the prompt's tokens, all but the first. With a `json_schema` (a JSON text) what is generated is JSON of that
    schema, followed by one of the `end_tokens`; "" leaves it free.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str = ""
    end_tokens: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


NOTHING_ASKED = SamplingParams()
