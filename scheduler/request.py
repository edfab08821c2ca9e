"""A request as a client gives it, and the sequence that the scheduler makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from scheduler.blocks import BlockTable
from scheduler.lockstep import Lockstep
from scheduler.sampling import NOTHING_ASKED, SamplingParams
from scheduler.slo import DEFAULT_CLASS, Grant, Promise


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be generated, wholly described, so that it can be given again to a restarted scheduler.

    `prompt` are token ids; `produced` the tokens that were already generated and published before (empty for a new
    request). `max_tokens` bounds all generated tokens, `produced` included. Generation ends at a token of
    `stop_token_ids` (the stop token itself is not published). With `max_tokens` 0 it ends once its prompt is computed.
    `age_s` is how long ago the client's request arrived when
    this was sent, so that clocks of different machines never meet. `promise` None: that of the server's class
    `slo_class` applies, or its default. KV is reused among requests of the same `cache_salt` only.
    Where several tenants wait, each enters in proportion to its `weight` (`scheduler.line`).
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = NOTHING_ASKED
    stop_token_ids: tuple[int, ...] = ()
    produced: tuple[int, ...] = ()
    age_s: float = 0.0
    promise: Promise | None = None
    slo_class: str = ""
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0


class Finish(Enum):
    """Why a sequence ended. STOP and LENGTH are OpenAI's; ERROR carries its reason in words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token after those before it, and the likeliest alternatives as (token, logprob), best
    first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(NamedTuple):  # which is frozen as well, and made in a third of the time: there is one for every token
    """What one iteration added to one request. `finish` is set exactly once, on a request's last delta.

    `reason` says more about the end: the id of the stop token, `kv_capacity` for a sequence that outgrew the pool
    alone, or an error in words. `cached_tokens` are prompt tokens whose KV was reused (on the first delta). `grant`
    comes before the first token, where the promise could not be given as it was asked for. `prompt_logprobs` are of all
    tokens of the prompt but the first, where they were asked for: with the first token, or with the end where there is
    none; not again for a request that had `produced` some before.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    reason: str | None = None
    cached_tokens: int = 0
    grant: Grant | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Phase(Enum):
    """HELD: without a slot, until another group's scheduler takes it over (`scheduler.exchange`)."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """A request's way through the scheduler. One idea: `computed` chases the tokens there are.

    Chunks, decodes, and resuming after a preemption all follow from it. `pending` counts tokens that have been
    scheduled to be sampled but whose value has not come back yet (it stays on the worker).

    A stream goes on in step with the others of its group: then what each step adds to it is counted in their common
    `lockstep`, and only what it was before stands here.
    """

    tokens: list[int]
    phase: Phase = Phase.WAITING
    lockstep: Lockstep | None = None
    stop_token_ids: tuple[int, ...] = field(init=False)
    promise: Promise
    first_token_at: float | None = None
    given: int = field(init=False)
    """Tokens that came with the request: its prompt, and what it had produced in an earlier life."""
    slot: int = -1
    final_length: int = field(init=False)
    """Tokens there are once it has generated all that it may."""
    request_id: str = field(init=False)
    arrival: float
    prefill_target: int = 0
    request: Request
    order: int
    slo_class: str = DEFAULT_CLASS
    predicted_ttft_s: float | None = None
    turn: float | None = None
    """Its tenant's, with which it entered: see `scheduler.line.FairLine`."""
    wanted_s: float | None = None
    """The TTFT that it asked for, where that could not be promised: it has it if nobody loses by that."""
    due: float = math.inf
    """When its next token was wanted as it came, or as it began to wait once more."""
    yields: bool = False
    """Whether it goes after the prompts that can be in time, for it cannot, or others could not beside it."""
    work: tuple[int, int, float] | None = None
    """From where to where it is to be computed, and about how many seconds that takes of an idle machine."""
    reusable: int = 0
    """So many of its tokens had KV already as it came."""
    blocks: BlockTable = field(default_factory=BlockTable)
    blocks_sent: int = 0
    known_blocks: int = 0
    """So many of its blocks hold what others may share, or equal others that do."""
    digests: list[bytes] = field(default_factory=list)
    cached_tokens: int = 0
    chunk_at: int = 0
    """The iteration of its last chunk, or the one before it entered."""
    preemptions: int = 0
    losses: int = 0
    """Times in a row that workers were lost while they computed it, without a token of it in between."""
    length_at_loss: int = -1
    gave_way: int = 0
    """Preemptions for want of blocks."""
    kept: list[int] = field(default_factory=list)
    """Host blocks that hold what was computed of it, while it waits to come back."""
    kept_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Those known so far, of its prompt's tokens from the second on, until they are told."""
    scores_wanted: int = field(init=False)
    """So many log-probabilities of its prompt are to be told; 0 once they are."""
    in_step_since: int = 0
    """It takes the steps after this one."""
    _gaps_since: int = field(default=0, init=False)
    _computed: int = field(default=0, init=False)
    _pending: int = field(default=0, init=False)
    _last_token_at: float | None = field(default=None, init=False)
    _largest_gap_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        request = self.request
        self.request_id = request.request_id
        self.stop_token_ids = request.stop_token_ids if request.max_tokens else ()  # nothing is generated to stop at
        self.given = len(request.prompt) + len(request.produced)
        self.final_length = len(request.prompt) + request.max_tokens
        scores = request.sampling.prompt_logprobs is not None and not request.produced
        self.scores_wanted = len(request.prompt) - 1 if scores else 0

    # How far it is, by itself or in step with others.

    @property
    def computed(self) -> int:
        """Tokens whose KV exists, or will once the plans under way are carried out."""
        steps = self.lockstep
        return self._computed if steps is None else self._computed + steps.planned - self.in_step_since

    @computed.setter
    def computed(self, tokens: int) -> None:
        self._computed += tokens - self.computed

    @property
    def pending(self) -> int:
        steps, since = self.lockstep, self.in_step_since
        return self._pending if steps is None else self._pending + steps.planned - max(steps.came, since)

    @pending.setter
    def pending(self, tokens: int) -> None:
        self._pending += tokens - self.pending

    @property
    def last_token_at(self) -> float | None:
        """In the scheduler's clock; None before its first one here."""
        steps = self.lockstep
        return self._last_token_at if steps is None or steps.came <= self.in_step_since else steps.last_at

    @last_token_at.setter
    def last_token_at(self, now: float | None) -> None:
        self._last_token_at = now

    @property
    def largest_gap_s(self) -> float:
        steps = self.lockstep
        in_step = 0.0 if steps is None else steps.longest_gap_s(self._gaps_since)
        return max(self._largest_gap_s, in_step)

    def had_gap(self, seconds: float) -> None:
        """Between two tokens that came by themselves."""
        self._largest_gap_s = max(self._largest_gap_s, seconds)

    def had_gap_of_its_own(self, step: int, seconds: float) -> None:
        """Before its token of that step: its token before that did not come with those of the others."""
        self._gaps_since = step
        self.had_gap(seconds)

    def fall_in(self, lockstep: Lockstep) -> None:
        """From the next step on it goes on with the others."""
        self.lockstep = lockstep
        self.in_step_since = self._gaps_since = lockstep.planned

    def fall_out(self) -> None:
        """It does not go on with them, and what it has come to is its own."""
        counted = self.computed, self.pending, self.last_token_at, self.largest_gap_s
        self._computed, self._pending, self._last_token_at, self._largest_gap_s = counted
        self.lockstep = None

    @property
    def computes_itself(self) -> bool:
        """Whether others' KV is of no use to it: log-probabilities of its prompt are still missing."""
        return len(self.prompt_logprobs) < self.scores_wanted

    def take_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """To be told, once."""
        taken, self.prompt_logprobs, self.scores_wanted = tuple(self.prompt_logprobs), [], 0
        return taken

    @property
    def length(self) -> int:
        """Tokens that exist, those still on the worker included."""
        return len(self.tokens) + (self._pending if self.lockstep is None else self.pending)

    @property
    def generated(self) -> int:
        """Tokens generated or about to be, those of an earlier life (`Request.produced`) included."""
        return self.length - len(self.request.prompt)

    @property
    def outstanding(self) -> int:
        """Tokens still to be computed, and those that may still be generated."""
        return self.length - self.computed + self.request.max_tokens - self.generated

    @property
    def goes_on(self) -> bool:
        """Whether anything is to be generated after the token that comes next (or, of one that is held, after what it
        has)."""
        comes = self.phase is not Phase.HELD
        return len(self.tokens) + comes < len(self.request.prompt) + self.request.max_tokens

    def next_token_due(self) -> float:
        """When the next token that can be scheduled is due, in the scheduler's clock.

        A token that was produced in an earlier life (`Request.produced`) has no time here: the count starts anew.
        """
        first, last, promise = self.first_token_at, self.last_token_at, self.promise
        if first is None or last is None:
            return promise.first_token_due(self.arrival)
        index = len(self.tokens) + self.pending - self.given
        if promise.tbt_s is None:  # as `token_due` has it: asked of every stream, in most iterations
            return first + index * promise.tpot_s
        return promise.token_due(index, first, last)

    def wanted_at(self) -> float:
        """When its next token is due, or would be if what it asked for had been promised."""
        if self.first_token_at is None and self.wanted_s is not None:
            return self.arrival + self.wanted_s
        return self.next_token_due()

    @property
    def prefill_offset(self) -> int:
        """Tokens of this prefill (the prompt; after a preemption also what was produced) whose KV exists."""
        return min(self._computed, self.prefill_target)  # whoever is in step had all of it computed before

    @property
    def prefill_remaining(self) -> int:
        return max(0, self.prefill_target - self._computed)

    @property
    def prefilling(self) -> bool:
        return self.phase is Phase.RUNNING and self.prefill_remaining > 0

    @property
    def decodable(self) -> bool:
        """Whether one more token can be scheduled: prefilled, and not already at its last token."""
        return (
            self.phase is Phase.RUNNING
            and self.prefill_remaining == 0
            and self.computed < self.length
            and self.length < self.final_length
        )
