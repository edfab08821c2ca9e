"""A worker of pure bookkeeping: it executes plans strictly, and every departure from the contract is an AssertionError.

It knows no model: the next token is a function of the tokens before it, so that whatever the schedule, a request must
come out with the same tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler.codec import decode_plan, decode_result, encode_plan, encode_result
from scheduler.plan import Admission, Forward, IterationPlan, IterationResult, Segment, Swap
from scheduler.present import Present
from scheduler.request import Delta, Request, Sequence, TokenLogprob
from scheduler.residents import MOST_PREEMPTIONS
from scheduler.roofline import Features
from scheduler.scheduler import Scheduler
from scheduler.slo import LONGEST_PROMISE_S

VOCAB = 97


def next_token(tokens: list[int]) -> int:
    value = len(tokens)
    for token in tokens[-8:]:
        value = (value * 31 + token + 7) % 1009
    return value % VOCAB


def expected_tokens(request: Request) -> list[int]:
    """What a request must produce: until its length, or up to (without) a stop token."""
    tokens = [*request.prompt, *request.produced]
    while len(tokens) - len(request.prompt) < request.max_tokens:
        token = next_token(tokens)
        if token in request.stop_token_ids:
            break
        tokens.append(token)
    return tokens[len(request.prompt) + len(request.produced) :]


def score_after(tokens: list[int]) -> TokenLogprob:
    """Of the last token after those before it, a number that depends on all that `next_token` sees."""
    return TokenLogprob(-float(next_token(tokens)))


def expected_scores(request: Request) -> list[TokenLogprob]:
    """Log-probabilities of its prompt that a request must get."""
    if request.sampling.prompt_logprobs is None or request.produced:
        return []
    return [score_after(list(request.prompt[:end])) for end in range(2, len(request.prompt) + 1)]


@dataclass
class SlotState:
    tokens: list[int]
    prompt_tokens: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    marks: list[int] = field(default_factory=list)

    def history(self) -> list[int]:
        """For each of its tokens a mark of all tokens up to it."""
        for token in self.tokens[len(self.marks) :]:
            self.marks.append(hash((self.marks[-1] if self.marks else 0, token)))
        return self.marks


@dataclass
class StrictWorker:
    """`kv` is what was written: for each offset of a block a mark of all tokens up to that position, as KV depends on
    them all. A sequence may begin with blocks that it has not written, and then must find its own tokens in them.
    """

    block_size: int
    num_blocks: int
    max_running: int
    slots: dict[int, SlotState] = field(default_factory=dict)
    last_iteration: int = 0
    kv: dict[int, list[int]] = field(default_factory=dict)
    reused: int = 0
    host: dict[int, list[int]] = field(default_factory=dict)
    """What was copied out of blocks, by host block."""
    brought: set[int] = field(default_factory=set)
    """Blocks that were copied back and not written since."""
    ran: list[list[Segment]] = field(default_factory=list)
    """Of the last plan, the segments of each forward, its decodes spelled out."""
    scored: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    """Of the last plan, what its chunks with `score` gave."""

    def execute(self, plan: IterationPlan) -> IterationResult:
        plan = decode_plan(encode_plan(plan))  # nothing but what survives the wire counts
        assert plan.iteration == self.last_iteration + 1, "iterations are numbered without a gap"
        self.last_iteration = plan.iteration
        for slot in plan.releases:
            assert slot in self.slots, f"slot {slot} released but not taken"
            del self.slots[slot]
        for admission in plan.admissions:
            self._admit(admission)
        for swap in plan.swaps:
            self._swap(swap)
        assert plan.forwards, "a plan runs something"
        assert all(forward.decodes or forward.chunks for forward in plan.forwards), "no forward is empty"
        self.ran, self.scored = [], []
        tokens = [token for forward in plan.forwards for token in self._forward(forward)]
        seconds, scored = tuple(0.0 for _ in plan.forwards), tuple(self.scored)
        result = IterationResult(plan.iteration, tuple(tokens), forward_s=seconds, prompt_logprobs=scored)
        return decode_result(encode_result(result))

    def _admit(self, admission: Admission) -> None:
        assert 0 <= admission.slot < self.max_running
        assert admission.slot not in self.slots, f"slot {admission.slot} given twice"
        assert 0 < admission.prompt_tokens <= len(admission.tokens)
        assert admission.computed < len(admission.tokens)
        assert admission.computed <= len(admission.blocks) * self.block_size
        self.slots[admission.slot] = SlotState(
            list(admission.tokens), admission.prompt_tokens, list(admission.blocks), admission.computed
        )

    def _swap(self, swap: Swap) -> None:
        for block, host_block in zip(swap.blocks, swap.host_blocks, strict=True):
            assert 0 <= block < self.num_blocks
            if swap.to_host:
                self.host[host_block] = list(self.kv[block])
            else:
                self.kv[block] = list(self.host[host_block])
                self.brought.add(block)

    def _segments(self, forward: Forward) -> list[Segment]:
        new_blocks: dict[int, tuple[int, ...]] = {}
        for slot, block in forward.new_blocks:
            new_blocks[slot] = (*new_blocks.get(slot, ()), block)
        assert set(new_blocks) <= set(forward.decodes), "chunks bring their own blocks"
        decodes = [
            Segment(slot, len(self.slots[slot].tokens) - 1, 1, new_blocks.get(slot, ()), sample=True)
            for slot in forward.decodes
        ]
        return [*decodes, *forward.chunks]

    def _forward(self, forward: Forward) -> list[int]:
        segments = self._segments(forward)
        self.ran.append(segments)
        slots = [segment.slot for segment in segments]
        assert len(slots) == len(set(slots)), "a sequence stands once in a forward"
        sampled = []
        for segment in segments:
            state = self.slots[segment.slot]
            assert segment.count > 0
            end = segment.start + segment.count
            assert end <= len(state.tokens), "only tokens that exist are computed"
            state.blocks.extend(segment.new_blocks)
            assert end <= len(state.blocks) * self.block_size, "every token has a place"
            self._skip(state, segment.start)
            self._read(state)
            self._write(state, end)
            if segment.score:
                last = min(end + 1, state.prompt_tokens)
                self.scored.append(tuple(score_after(state.tokens[:i]) for i in range(segment.start + 2, last + 1)))
            assert segment.sample == (end == len(state.tokens)), "only the last token there is is sampled from"
            if segment.sample:
                token = next_token(state.tokens)
                state.tokens.append(token)
                sampled.append(token)
        self._check_blocks()
        return sampled

    def _skip(self, state: SlotState, start: int) -> None:
        """What others have computed: whole blocks, and only where it would compute next."""
        skipped = start - state.computed
        assert skipped >= 0, "each token is computed once, in order"
        if skipped:
            assert state.computed % self.block_size == 0, "blocks are skipped whole"
            whole = start % self.block_size == 0 or state.blocks[start // self.block_size] in self.brought
            assert whole, "blocks are skipped whole, but for what was copied back"
            state.computed = start
            self.reused += skipped

    def _read(self, state: SlotState) -> None:
        """As attention does: everything before the segment."""
        history, size = state.history(), self.block_size
        for index in range(-(-state.computed // size)):
            wanted = history[index * size : min(state.computed, (index + 1) * size)]
            there = self.kv.get(state.blocks[index], [])
            assert there[: len(wanted)] == wanted, "a block holds the KV of other tokens"

    def _write(self, state: SlotState, end: int) -> None:
        history = state.history()
        for position in range(state.computed, end):
            block = self.kv.setdefault(state.blocks[position // self.block_size], [0] * self.block_size)
            block[position % self.block_size] = history[position]
            self.brought.discard(state.blocks[position // self.block_size])
        state.computed = end

    def _check_blocks(self) -> None:
        for state in self.slots.values():
            assert len(state.blocks) == len(set(state.blocks)), "a block stands once in a table"
            assert all(0 <= block < self.num_blocks for block in state.blocks)
        held = Counter(block for state in self.slots.values() for block in state.blocks)
        for state in self.slots.values():
            written = state.blocks[state.computed // self.block_size :]
            assert all(held[block] == 1 for block in written), "a block that is written belongs to one sequence"

    def replace(self) -> None:
        """New workers: no slot is taken, and no block holds anything."""
        self.slots.clear()
        self.kv.clear()
        self.host.clear()
        self.brought.clear()


@dataclass
class Run:
    """A scheduler and its strict worker, stepped by hand, with what every request got so far."""

    scheduler: Scheduler
    worker: StrictWorker
    now: float = 0.0
    got: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, Delta] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    scores: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    """Log-probabilities of its prompt that a request was told."""
    plans: list[IterationPlan] = field(default_factory=list)
    ran: list[list[list[Segment]]] = field(default_factory=list)
    """Of each plan, `StrictWorker.ran`."""

    @classmethod
    def of(cls, scheduler: Scheduler) -> Run:
        c = scheduler.config
        return cls(scheduler, StrictWorker(c.block_size, c.num_blocks, c.max_running))

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)

    @property
    def segments(self) -> list[Segment]:
        """Of the last plan that ran."""
        return [segment for forward in self.ran[-1] for segment in forward]

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.take(self.scheduler.take_deltas())

    def step(self) -> IterationPlan | None:
        """One iteration; None where the scheduler has nothing to run."""
        self.now += 1.0
        plan = self.scheduler.schedule(self.now)
        self.take(self.scheduler.take_deltas())
        self.check()
        if plan is not None:
            self.plans.append(plan)
            result = self.worker.execute(plan)
            self.ran.append(self.worker.ran)
            self.take(self.scheduler.commit(result, self.now))
            self.check()
        return plan

    def check(self) -> None:
        self.scheduler.check()
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert self.scheduler.intake.present == asking_each(running, waiting), "what is known of it is as it is"
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            assert sequence.gave_way <= MOST_PREEMPTIONS, "no thrash"

    def take(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ended, "nothing follows the end of a request"
            first = not self.got.get(delta.request_id)
            assert first or not delta.cached_tokens, "the first delta says what was cached"
            self.cached[delta.request_id] = self.cached.get(delta.request_id, 0) + delta.cached_tokens
            assert first or not delta.prompt_logprobs, "a prompt's log-probabilities come first"
            self.scores.setdefault(delta.request_id, []).extend(delta.prompt_logprobs)
            self.got.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish is not None:
                self.ended[delta.request_id] = delta

    def drain(self, bound: int = 100_000) -> None:
        """Step until nothing is left. Fails where that does not happen within the bound, or a step does nothing."""
        for _ in range(bound):
            if self.scheduler.idle:
                return
            ended = len(self.ended)
            assert self.step() is not None or len(self.ended) > ended, "requests are left, but nothing runs"
        raise AssertionError(f"not done after {bound} iterations")


def asking_each(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Present:
    """Who is there, by looking at every sequence."""
    computing = [sequence for sequence in running if sequence.prefilling]
    streams = [sequence for sequence in running if not sequence.prefilling]
    left = [*[(s, s.length - s.computed) for s in computing], *[(s, s.length - s.reusable) for s in waiting]]
    owing = [(s.arrival + 2 * s.promise.ttft_s, tokens) for s, tokens in left if s.yields]
    return Present(
        decodes=Features(decodes=len(streams), decode_context=sum(sequence.computed for sequence in streams)),
        pace_s=min((sequence.promise.pace_s for sequence in streams), default=LONGEST_PROMISE_S),
        prompts=[(sequence.due, tokens) for sequence, tokens in left if not sequence.yields],
        lengths=sum(sequence.length for sequence in running),
        tokens_to_compute=sum(tokens for _, tokens in left),
        owed=(min((at for at, _ in owing), default=math.inf), sum(tokens for _, tokens in owing)),
    )
