"""The micro-profile: a few seconds of iterations on the real workers, from which the cost model is fitted.

Runs before anything is served, with slots and blocks that nobody has yet. What KV holds does not matter to its cost, so
that a decode at any context can be measured without computing it.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from cluster.config import EngineConfig
from cluster.engine import EngineInfo
from cluster.executor import Executor
from scheduler.costmodel import Coefficients, Sample, fit
from scheduler.plan import Admission, Forward, IterationPlan, Segment
from scheduler.roofline import Features
from scheduler.sampling import SamplingParams
from workers.caches import cache_dir

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Case:
    """An iteration to measure: decodes of one context, and a chunk from an offset (0 tokens: none)."""

    decodes: int
    context: int
    chunk: int = 0
    offset: int = 0

    @property
    def features(self) -> Features:
        f = Features(decodes=self.decodes, decode_context=self.decodes * self.context)
        return f.with_chunk(self.offset, self.chunk) if self.chunk else f


CASES = (
    *(Case(b, s) for b, s in ((1, 64), (8, 64), (8, 512), (32, 128), (4, 2048), (16, 1024))),
    *(Case(0, 0, c, o) for c, o in ((16, 0), (64, 0), (128, 512), (256, 0), (512, 1024))),
    *(
        Case(8, 128, c, o)
        for c, o in ((4, 0), (16, 0), (8, 512), (32, 1024), (16, 2048), (64, 512), (128, 0), (256, 1024))
    ),
)


TRIED = (Case(1, 64), Case(8, 64), Case(0, 0, 64))
TOLERANCE = 1.33


async def profile(
    executor: Executor, info: EngineInfo, config: EngineConfig, clock: Callable[[], float], progress: Progress | None
) -> list[Sample]:
    """Each case that fits the pool, after a round to warm up, for as many rounds as time allows (at least two)."""
    cases = _cases(info, config)
    plans = _Plans(info)
    samples: list[Sample] = []
    started, rounds = clock(), 0
    while rounds < 2 or (rounds < 6 and (clock() - started) * (rounds + 1) / rounds < config.profile_seconds):
        for done, case in enumerate(cases):
            taken = await _time(executor, plans.run(case), clock)
            if rounds > 0:
                samples.append(Sample(case.features, taken))
            if progress is not None:
                progress(done + rounds * len(cases), 6 * len(cases))
        rounds += 1
    return samples


def _cases(info: EngineInfo, config: EngineConfig) -> list[Case]:
    return [case for case in CASES if _fits(case, info, config.max_running)]


def _fits(case: Case, info: EngineInfo, max_running: int) -> bool:
    sequences = case.decodes + (case.chunk > 0)
    longest = max(case.context, case.offset + case.chunk)
    blocks = case.decodes * -(-case.context // info.block_size) + -(-(case.offset + case.chunk) // info.block_size)
    return sequences <= max_running and blocks <= info.num_blocks and longest < info.max_model_len


class _Plans:
    """Plans in a row of their own numbering; each case's sequences enter, run once and leave with the next plan."""

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._iteration = 0

    def run(self, case: Case) -> Iterator[IterationPlan]:
        block, segments, admissions = 0, [], []
        shapes = [(case.context - 1, 1)] * case.decodes + ([(case.offset, case.chunk)] if case.chunk else [])
        for slot, (start, count) in enumerate(shapes):
            needed = -(-(start + count) // self._info.block_size)
            tokens = tuple(position % self._info.vocab_size for position in range(start + count))
            admissions.append(Admission(slot, tokens, len(tokens), SamplingParams(temperature=0.0)))
            segments.append(Segment(slot, start, count, tuple(range(block, block + needed)), sample=True))
            block += needed
        yield self._plan(admissions=tuple(admissions))
        yield self._plan(forwards=(Forward(chunks=tuple(segments)),))
        yield self._plan(releases=tuple(range(len(shapes))))

    def _plan(
        self,
        forwards: tuple[Forward, ...] = (),
        admissions: tuple[Admission, ...] = (),
        releases: tuple[int, ...] = (),
    ) -> IterationPlan:
        self._iteration += 1
        return IterationPlan(self._iteration, forwards, admissions, releases)


async def fitted(
    executor: Executor,
    info: EngineInfo,
    config: EngineConfig,
    clock: Callable[[], float],
    progress: Progress | None,
    trusted: bool = False,
) -> Coefficients:
    """The coefficients of these workers: from the cache where host, model, TP and dtype are known, or measured.

    Unless it is `trusted`, what is cached is tried on a few iterations first: a machine that was busy when it was
    measured, or is now another machine under the same name, is measured again.
    """
    path = _cache_path(info, config)
    try:
        known = Coefficients(**json.loads(path.read_text())["coefficients"])
    except (OSError, ValueError, KeyError, TypeError):
        known = None  # not there, or not whole
    if known is not None and (trusted or await _still_true(known, executor, info, config, clock)):
        return known
    coefficients = fit(await profile(executor, info, config, clock, progress))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({"engine": asdict(info), "coefficients": coefficients.as_dict()}, indent=2))
    partial.replace(path)
    return coefficients


async def _still_true(
    known: Coefficients, executor: Executor, info: EngineInfo, config: EngineConfig, clock: Callable[[], float]
) -> bool:
    """Whether a few quick iterations take what is known of them, give or take a third."""
    cases = [case for case in TRIED if _fits(case, info, config.max_running)]
    plans, ratios = _Plans(info), []
    for attempt in range(4):
        for case in cases:
            taken = await _time(executor, plans.run(case), clock)
            if attempt > 0:  # the first warms up
                ratios.append(taken / known.predict(case.features))
    return not ratios or 1 / TOLERANCE < median(ratios) < TOLERANCE


async def _time(executor: Executor, plans: Iterable[IterationPlan], clock: Callable[[], float]) -> float:
    """Seconds of the one among a case's plans that computes something."""
    seconds = 0.0
    for plan in plans:
        before = clock()
        await executor.execute(plan)
        if plan.forwards:
            seconds = clock() - before
    return seconds


def _cache_path(info: EngineInfo, config: EngineConfig) -> Path:
    """By what decides the cost. A model is known by its shape; what its weights are does not matter. A small pool has
    fewer cases measured, so that its coefficients are not those of a large one."""
    what = (
        platform.node(),
        _processor(),
        _shape(Path(info.model_dir)),
        config.threads,
        _cases(info, config),
        info.tp,
        info.device,
        info.dtype,
        info.kv_dtype,
        info.attention,
        info.transport,
    )
    return cache_dir() / "profiles" / f"{hashlib.sha256(repr(what).encode()).hexdigest()[:16]}.json"


def _shape(model_dir: Path) -> str:
    try:
        return (model_dir / "config.json").read_text()
    except OSError:
        return str(model_dir)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}" if models else platform.processor()
