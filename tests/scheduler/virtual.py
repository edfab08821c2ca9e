"""A scheduler in a world of virtual time that matches its cost model, iteration by iteration."""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler.costmodel import Coefficients, OnlineCostModel
from scheduler.plan import IterationPlan, Segment
from scheduler.policies.slo import SloBudget, SloPolicy, SloSettings
from scheduler.request import Request
from scheduler.roofline import Features
from scheduler.scheduler import Scheduler, SchedulerConfig
from scheduler.slo import Promise
from tests.scheduler.world import VOCAB, Run

COST = Coefficients(
    overhead=0.002, read=0.04, per_token=0.0025, per_context=1e-6, per_pair=1e-7, per_sequence=1e-4, norm=2.0
)
"""About what a laptop processor does with a model of 135 million parameters."""
# Without prefix caching: prompts that are alike here stand for different ones.
CONFIG = SchedulerConfig(
    num_blocks=4000, block_size=16, max_model_len=9000, vocab_size=VOCAB, max_running=32, prefix_caching=False
)


def features_of(ran: list[list[Segment]], prefilling: set[int]) -> Features:
    f = Features()
    for s in (segment for forward in ran for segment in forward):
        if s.slot in prefilling:
            f = f.with_chunk(s.start, s.count)
        else:
            f = f._replace(decodes=f.decodes + 1, decode_context=f.decode_context + s.start + 1)
    return f


@dataclass
class VirtualRun(Run):
    """Time passes as the cost model says, times `truth`; every token's time and lateness is kept."""

    truth: float = 1.0
    times: dict[str, list[float]] = field(default_factory=dict)
    features: list[Features] = field(default_factory=list)

    @classmethod
    def with_policy(cls, settings: SloSettings | None = None, truth: float = 1.0) -> VirtualRun:
        policy = SloPolicy(SloBudget(OnlineCostModel(COST), settings))
        run = cls.of(Scheduler(CONFIG, policy))
        assert isinstance(run, VirtualRun)
        run.truth = truth
        return run

    @property
    def budget(self) -> SloBudget:
        policy = self.scheduler.policy
        assert isinstance(policy, SloPolicy)
        return policy.budget

    def step(self) -> IterationPlan | None:
        plan = self.scheduler.schedule(self.now)
        self.take(self.scheduler.take_deltas())
        if plan is None:
            return None
        prefilling = {s.slot for s in self.scheduler.running if not self.got.get(s.request_id)}
        result = self.worker.execute(plan)
        f = features_of(self.worker.ran, prefilling)
        assert self.scheduler.under_way(plan.iteration).features == (f,)
        self.features.append(f)
        self.now += COST.predict(f) * self.truth
        for delta in self.scheduler.commit(result, self.now):
            self.take([delta])
            self.times.setdefault(delta.request_id, []).extend([self.now] * len(delta.tokens))
        self.scheduler.check()
        return plan

    def latest(self, request: Request) -> float:
        """By how much its latest token, but the first, was late (negative: early)."""
        promise, times = request.promise, self.times[request.request_id]
        assert promise is not None
        return max(
            (t - promise.token_due(j, times[0], times[j - 1]) for j, t in enumerate(times) if j > 0), default=-1.0
        )


def prompt(length: int) -> tuple[int, ...]:
    return tuple(i % VOCAB for i in range(length))


def stream(name: str, promise: Promise, tokens: int = 60) -> Request:
    return Request(name, prompt(16), tokens, promise=promise)
