"""The scheduler: who runs in the next iteration, where its KV goes, and what came of the last one.

`schedule(now)` gives a plan, `commit(result, now)` takes its answer; the policy decides the mix, this class keeps
slots, blocks and queues. Plans run on the workers in the order in which they were made, so whatever a plan frees may be
given away in the same or the next plan. Several plans may be under way at once: a token that is still on its worker is
`pending`, and a sequence that turns out to be finished costs its tokens under way, which are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from scheduler.admission import check_request
from scheduler.blocks import BlockPool
from scheduler.booking import Booking, book_forward, entering_a_block, still_running
from scheduler.budget import Batch
from scheduler.census import Census, Roll
from scheduler.config import SchedulerConfig
from scheduler.directory import Directory
from scheduler.entrance import Entrance
from scheduler.errors import RequestRefused
from scheduler.exchange import Exchange, Role
from scheduler.intake import Intake
from scheduler.ledger import Ledger
from scheduler.line import FairLine, Line
from scheduler.losses import MOST_LOSSES, suspects
from scheduler.plan import NO_TOKEN, IterationPlan, IterationResult
from scheduler.policies import Mix, Policy
from scheduler.prefixes import Prefixes
from scheduler.progress import InFlight, Served, Timings, chunks_of
from scheduler.queueing import check_queue
from scheduler.request import Delta, Finish, Phase, Request, Sequence
from scheduler.residents import Residents
from scheduler.scoring import learn_scores
from scheduler.swap import HostPool
from scheduler.tally import PreemptionCause, Tally
from scheduler.under_way import UnderWay

__all__ = ["KV_CAPACITY", "Scheduler", "SchedulerConfig"]

KV_CAPACITY = "kv_capacity"


class Scheduler:
    """`prefix_key`: secret bytes (up to 64) for the digests of blocks, where clients do not trust each other.

    `directory`: where it is told which blocks' content is known here, and `census`, how many sequences are here, beside
    those of other schedulers.
    With a role other than `both` sequences travel between schedulers (see `exchange`): those have to have the same
    `prefix_key`, and one count of `orders`, by which sequences are older or younger.
    """

    __slots__ = (
        "_gave_way", "_iteration", "_ledger", "_limits", "_orders", "_residents", "_running", "_sequences",
        "_tally", "_under_way", "_waiting", "config", "entrance", "exchange", "host", "intake", "policy",
        "pool", "prefixes",
    )  # fmt: skip

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        prefix_key: bytes = b"",
        *,
        role: Role = "both",
        orders: Iterator[int] | None = None,
        directory: Directory | None = None,
        census: Census | None = None,
    ) -> None:
        self.config = config
        self._limits = config.limits
        self.policy = policy
        self.pool = BlockPool(config.num_blocks, config.block_size, directory)
        self._sequences = Roll(Census() if census is None else census)
        self._waiting = Line() if role == "decode" else FairLine()
        self.prefixes = Prefixes(self.pool, enabled=config.prefix_caching, key=prefix_key)
        self.host = HostPool(config.swap_blocks, self.pool)
        self._residents = Residents(config.max_running, self.pool, self.prefixes, self.host)
        self._running = self._residents.line
        self.exchange = Exchange(role, self._sequences, self._waiting, self._residents, self.pool, self.prefixes)
        self.entrance = Entrance(self._waiting, self._residents, self.exchange, self._give_way)
        self._under_way = UnderWay()
        self._ledger = Ledger()
        self._gave_way: list[str] = []
        self._iteration = 0
        self._orders = orders or itertools.count()
        self._tally = Tally()
        self.intake = Intake(self._waiting, self._residents, self.pool, self.prefixes)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences that hold a slot, oldest first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences that wait for a slot or for blocks, in the order in which they would enter as they came."""
        return tuple(self._waiting.in_turn())

    # Requests come and go.

    def add(self, request: Request, now: float, again: bool = False) -> None:
        """Queue a request. Raises RequestRefused; a request that is queued will end, in one way or another.

        `again`: another scheduler had admitted it, so that neither the queue's bound nor the gate is for it.
        """
        if request.request_id in self._sequences:
            raise RequestRefused("duplicate_request", f"request {request.request_id!r} is running already")
        check_request(request, self._limits)
        if not again:
            check_queue(request, self._waiting, self.config)
        sequence = self.intake.newcomer(request, now)
        sequence.order = next(self._orders)
        grant = None if again or request.produced else self.intake.judge(sequence, now)
        if grant is not None:
            self._ledger.tell(Delta(sequence.request_id, grant=grant))
        self.exchange.bound(sequence)
        self._sequences[request.request_id] = sequence
        self._waiting.join(sequence)
        self.intake.came(sequence)

    def abort(self, request_id: str, finish: Finish = Finish.ABORT) -> bool:
        """End a request now; its blocks are free at once. False where no such request is known.

        `finish` STOP: its reader found a stop string, so that it has had all it asked for.
        """
        return self.end(request_id, finish)

    def end(self, request_id: str, finish: Finish, reason: str | None = None) -> bool:
        """End a request for the reason, of what went wrong with it alone. False where no such request is known."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, finish, reason)
        return True

    def end_all(self, reason: str) -> None:
        """End every request with an error, on workers that are there."""
        for sequence in list(self._sequences.values()):
            self._end(sequence, Finish.ERROR, reason)

    def sequence(self, request_id: str) -> Sequence | None:
        return self._sequences.get(request_id)

    @property
    def sequences(self) -> Roll:
        """Running, waiting or held, by request. To look into: it stays the same object."""
        return self._sequences

    def fail_all(self, reason: str) -> None:
        """End every request with an error, after the workers were lost."""
        self.end_all(reason)
        self._forget_workers()

    def requeue_all(self) -> None:
        """Start every running sequence over from its tokens, for workers that are new and know nothing.

        Those that were being computed each of the last `MOST_LOSSES` times, without getting on, are ended: it may be
        one of them that the workers die of.
        """
        self._tally.losses += 1
        for sequence in suspects(self._running, self._under_way):
            self._end(sequence, Finish.ERROR, f"the workers were lost {MOST_LOSSES} times while they computed this")
        for sequence in [*self._running, *(held for held in self.exchange.held if held.blocks)]:
            self._preempt(sequence, "workers_lost")
        for sequence in [waiting for waiting in self._waiting if self.exchange.gives_back(waiting)]:
            self._waiting.leave(sequence)
            self.exchange.give_back(sequence)
        self._forget_workers()
        for sequence in list(self._waiting):
            if self.pool.blocks_for(sequence.length) > self.pool.total:  # its next token would have been one too many
                self._end(sequence, Finish.LENGTH, KV_CAPACITY)

    def _forget_workers(self) -> None:
        for sequence in (*self._waiting, *self.exchange.held):
            sequence.pending = 0
            self.host.forget(sequence)
        self._under_way.clear()
        self._running.streams.forget_plans()
        self.intake.changed()
        self.exchange.forget_workers()
        self._residents.forget_workers()

    def leave_tokens_untold(self) -> None:
        """Nobody reads them: from now on deltas tell grants, first and last tokens and ends, and may tell others."""
        self._ledger.read = False

    def take_timings(self) -> Timings:
        """Of every token that was committed since the last call."""
        return self._ledger.take_timings()

    def take_served(self) -> list[Served]:
        """Requests that ended as they should since the last call."""
        return self._ledger.take_served()

    @property
    def has_news(self) -> bool:
        """Whether there are deltas, or requests served, that nobody has taken."""
        return self._ledger.has_news

    def take_deltas(self) -> list[Delta]:
        """What came outside of a commit (grants, and who was aborted, outgrew the pool, failed) since the last call."""
        return self._ledger.take_deltas()

    def written(self, sequence: Sequence) -> int:
        """Tokens of a running or held sequence whose KV has been written: computed, and not only planned to be."""
        return self._under_way.written(sequence)

    def is_past(self, iteration: int) -> bool:
        """Whether everything that was made up to that plan has been answered."""
        return self._under_way.is_past(iteration)

    @property
    def idle(self) -> bool:
        return not self._sequences

    # One iteration.

    def schedule(self, now: float) -> IterationPlan | None:
        """The next iteration, or None where nothing can run (until a commit, an abort or an arrival)."""
        self.intake.changed()
        granted, gave_way = self._compose(now)
        while gave_way and not granted:
            granted, gave_way = self._compose(now)  # all who were drafted gave way: let those who stayed run
        if not granted:
            return None
        self._iteration += 1
        booking = Booking()
        features, chunks = tuple([mix.features for mix in granted]), chunks_of(granted)
        preempted, self._gave_way = tuple(self._gave_way), []
        plan = IterationPlan(
            iteration=self._iteration,
            admissions=self._residents.take_admissions(),
            releases=self._residents.take_releases(),
            swaps=self.host.take_swaps(),
            forwards=tuple([book_forward(mix, self._running, booking) for mix in granted]),
        )
        for mix in granted:
            for draft in mix.chunks:
                draft.sequence.chunk_at = self._iteration
        in_flight = InFlight(
            sampling=booking.sampling,
            features=features,
            decision=self.policy.decision,
            chunks=chunks,
            preempted=preempted,
            written=booking.written,
            scored=booking.scored,
            steps=booking.steps,
        )
        self._under_way.add(plan.iteration, in_flight)
        return plan

    def under_way(self, iteration: int) -> InFlight:
        """What is known of a plan that has not been committed. Raises KeyError for no such plan."""
        return self._under_way[iteration]

    def commit(self, result: IterationResult, now: float) -> list[Delta]:
        """Take the answer to a plan. Returns what it added to each request, with what ended meanwhile.

        Raises ValueError for an answer to no plan under way, or one that does not match its plan.
        """
        under_way = self._under_way.answered(result)
        self.intake.changed()
        deltas = self._ledger.take_deltas()
        if under_way.scored:
            for sequence, reason in learn_scores(under_way.scored, result.prompt_logprobs):
                self._end(sequence, Finish.ERROR, reason)
        if under_way.written:
            self.prefixes.learn(under_way.written, under_way.failed(result))
        self._take_tokens(under_way, result, now)
        added = self._ledger.take_deltas()
        return deltas + added if deltas else added

    def _take_tokens(self, under_way: InFlight, result: IterationResult, now: float) -> None:
        apart = self._take_steps(under_way, result, now)
        if not apart:
            return
        logprobs, errors = dict(result.logprobs), dict(result.errors)
        travels, finished = self.exchange.role == "prefill", Phase.FINISHED
        for index in apart:
            sequence, token = under_way.sampling[index], result.tokens[index]
            sequence.pending -= 1
            if sequence.phase is finished:
                continue
            if token == NO_TOKEN:
                self._end(sequence, Finish.ERROR, errors.get(index, "no token was sampled"))
            elif token in sequence.stop_token_ids:
                self._end(sequence, Finish.STOP, str(token))
            else:
                handed_over = travels and self.exchange.unbound(sequence)
                told, first = (logprobs[index],) if index in logprobs else (), sequence.first_token_at is None
                delta = self._ledger.book(sequence, token, told, now)
                if first:
                    self.intake.first_token_of(sequence, now)
                if delta.finish is not None:
                    self._finish(sequence, delta)
                elif handed_over:
                    self.exchange.hold(sequence)

    def _take_steps(self, under_way: InFlight, result: IterationResult, now: float) -> list[int]:
        """Book the tokens of those that go on with all other streams, which is nearly everybody in nearly every
        iteration. Returns where in the plan's order the others are."""
        sampling, others, at = under_way.sampling, list[int](), 0
        told = {sampling[at].request_id: (logprob,) for at, logprob in result.logprobs} if result.logprobs else {}
        for step in under_way.steps:
            came = self._running.streams.tokens_came(step, result.tokens, now)
            self._ledger.book_step(came, told)
            others += range(at, step.first)
            others += came.apart
            at = step.end
        others += range(at, len(sampling))
        return others

    def _compose(self, now: float) -> tuple[list[Mix], bool]:
        """What the policy wants and the blocks allow, and whether a sequence gave way for want of blocks."""
        if self._waiting:
            self.entrance.let_in(self.policy.urgency, now, self._iteration, not self.intake.divides)
        mixes = self.policy.compose(self._batch(now))
        gave_way = self._secure_blocks(mixes, now)
        if gave_way:
            mixes = [mix for mix in map(still_running, mixes) if not mix.empty]
        return mixes, gave_way

    def _batch(self, now: float) -> Batch:
        """Who wants something, without those that wait for what another computes."""
        batch = self._running.batch(now)
        if not batch.prefills:
            return batch
        prefills = self.prefixes.worth_computing(batch.prefills, self._under_way.filling, self._iteration)
        return batch if prefills is batch.prefills else Batch(prefills, batch.decodes, now)

    # Blocks.

    def _secure_blocks(self, mixes: list[Mix], now: float) -> bool:
        """Give everybody the blocks that they will write, preempting by the policy's choice when there are none left.

        True where a sequence was preempted or ended for it.
        """
        gave_way = False
        for mix in mixes:
            for sequence in entering_a_block(mix.decodes, self.pool.block_size):
                gave_way |= self._secure(sequence, 1, now)
            for draft in mix.chunks:
                gave_way |= self._secure(draft.sequence, draft.count, now)
        return gave_way

    def _secure(self, sequence: Sequence, count: int, now: float) -> bool:
        """Whether somebody had to give way, perhaps the sequence itself, for the blocks of `count` tokens of it."""
        gave_way = False
        while sequence.phase is Phase.RUNNING and not self._residents.grow(sequence, count):
            gave_way = True
            if len(self._running) == 1 and not self.exchange.arriving:
                self._end(sequence, Finish.LENGTH, KV_CAPACITY)
            else:
                self._give_way(self.policy.victim(self._residents.displaceable(sequence), now))
        return gave_way

    def _give_way(self, sequence: Sequence) -> None:
        self._preempt(sequence, "kv_blocks")
        self._gave_way.append(sequence.request_id)

    def _preempt(self, sequence: Sequence, cause: PreemptionCause) -> None:
        """Take blocks and slot away; the sequence goes on once its whole context fits."""
        back = self.exchange.gives_back(sequence)
        if sequence.phase is Phase.HELD:
            self.exchange.drop(sequence)
        elif cause == "kv_blocks":
            self.exchange.leaves(sequence, self._iteration + 1)
            back = not self._residents.displace(sequence) and back
        else:
            self._residents.vacate(sequence)
        sequence.preemptions += 1
        self._tally.preempted(cause)
        if back:
            self.exchange.give_back(sequence)
        else:
            sequence.phase = Phase.WAITING
            self.exchange.bound(sequence)
            self._waiting.join(sequence)

    # Results.

    def _end(self, sequence: Sequence, finish: Finish, reason: str | None = None) -> None:
        cached = sequence.cached_tokens if sequence.first_token_at is None else 0
        scores = sequence.take_prompt_logprobs() if sequence.scores_wanted else ()
        self._finish(sequence, Delta(sequence.request_id, (), (), finish, reason, cached, None, scores))

    def _finish(self, sequence: Sequence, last: Delta) -> None:
        if sequence.phase is Phase.RUNNING:
            self.exchange.leaves(sequence, self._iteration)
            if last.finish is Finish.ERROR:
                self.pool.forget(sequence.blocks)  # who knows what they hold
            self._residents.vacate(sequence)
        elif sequence.phase is Phase.WAITING:
            self._waiting.leave(sequence)
            self.host.forget(sequence)
        elif sequence.phase is Phase.HELD:
            self.exchange.drop(sequence)
        self.exchange.placed.discard(sequence.request_id)
        sequence.phase = Phase.FINISHED
        del self._sequences[sequence.request_id]
        self._ledger.close(sequence, last)

    # Figures.

    def stats(self) -> dict[str, Any]:
        """Figures now, and counts since the beginning (`Tally.figures`). Outstanding tokens: of prompts not yet
        computed, and those that may still be generated."""
        return {
            "policy": self.policy.name,
            "iterations": self._iteration,
            "running": len(self._running),
            "waiting": len(self._waiting),
            **self.exchange.figures(),
            **self._tally.figures(self.pool, self.prefixes, self.host),
            "tokens_outstanding": sum(sequence.outstanding for sequence in self._sequences.values()),
        }

    def audit(self) -> str | None:
        """`check` for a server that goes on in any case: what broke is counted, and told."""
        try:
            self.check()
        except ValueError as broken:
            self._tally.violations += 1
            return str(broken)
        return None

    def check(self) -> None:
        """Invariants that hold between any two calls. Raises ValueError naming the one that broke."""
        self._residents.check(self.exchange.tables, self.exchange.slots)
        self.host.check(self._sequences.values())
        if len(self._sequences) != len(self._running) + len(self._waiting) + len(self.exchange.held):
            raise ValueError("a sequence is in no queue or in two")
