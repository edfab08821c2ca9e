"""The simulated cluster: times by hand for one request, and what must hold whatever the load and the policy."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.assembly import make_scheduler
from cluster.config import EngineConfig
from cluster.loop import IterationLoop
from cluster.simulated.cluster import Noise, SimulatedCluster, simulate
from cluster.simulated.machine import Machine, by_hardware
from cluster.simulated.prompts import prompt_tokens
from cluster.simulated.virtual_time import NothingLeft, VirtualLoop, run_virtual
from cluster.workloads import ClosedLoop, OpenLoop, PlannedRequest, RandomPrompt
from scheduler.hardware import gpu
from scheduler.policies import POLICIES
from scheduler.roofline import Features
from scheduler.scheduler import Scheduler
from scheduler.shapes import known_shape


def config_of(policy: str = "chunked", **more: object) -> EngineConfig:
    return EngineConfig(model="simulated", policy=policy, ttft_ms=2000, tpot_ms=50, **more)  # type: ignore[arg-type]


def machine_of(config: EngineConfig) -> Machine:
    return by_hardware(config, known_shape("Llama-3.1-8B"), gpu("A100").hardware)


def planned(at_s: float, prompt: int, output: int) -> PlannedRequest:
    return PlannedRequest(RandomPrompt(prompt, f"{at_s}/{prompt}"), output, at_s)


# Virtual time.


def test_time_is_exactly_the_timer_that_is_due() -> None:
    moments = [0.1, 0.1 + 0.2, 12345.678901234567, 12345.678901234567 + 1e-6, 1e6 / 3]

    async def main(loop: VirtualLoop) -> list[float]:
        seen: list[float] = []
        for moment in moments:
            loop.call_at(moment, lambda: seen.append(loop.time()))
        await asyncio.sleep(2e6)
        return seen

    assert run_virtual(main) == moments


def test_sleepers_wake_in_order_and_waiting_for_nothing_is_an_error() -> None:
    async def ordered(loop: VirtualLoop) -> list[int]:
        woken: list[int] = []

        async def sleeper(seconds: int) -> None:
            await asyncio.sleep(seconds)
            assert loop.time() == seconds
            woken.append(seconds)

        await asyncio.gather(*(sleeper(seconds) for seconds in (3600, 5, 86_400 * 30, 1)))
        return woken

    assert run_virtual(ordered) == [1, 5, 3600, 86_400 * 30]
    with pytest.raises(NothingLeft):
        run_virtual(lambda loop: asyncio.Event().wait())


# The cluster.


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_groups_are_made_of_what_serves(policy: str) -> None:
    config = config_of(policy, groups=2)

    async def main(loop: VirtualLoop) -> list[IterationLoop]:
        return SimulatedCluster(config, machine_of(config), Noise(), loop).loops

    for made in run_virtual(main):
        live = make_scheduler(config_of("chunked"), machine_of(config).info)
        assert type(made) is IterationLoop
        assert type(made.scheduler) is Scheduler is type(live)
        assert type(made.scheduler.policy).__module__ == f"scheduler.policies.{policy}"


@pytest.mark.parametrize("overlap", [1, 2])
def test_one_request_takes_what_the_cost_model_says(overlap: int) -> None:
    """A prompt of 1,000 tokens in chunks of 512 and 488, then a decode for each token but the first."""
    config = config_of(overlap=overlap)
    machine = machine_of(config)
    cost = machine.cost.predict
    (request,) = simulate(config, machine, OpenLoop([planned(3.0, 1000, 4)])).requests
    first = 3.0 + cost(Features().with_chunk(0, 512)) + cost(Features().with_chunk(512, 488))
    assert request.tokens[0] == pytest.approx(first)
    decodes = [cost(Features(decodes=1, decode_context=1000 + n)) for n in (1, 2, 3)]
    assert request.gaps == pytest.approx(decodes)
    assert request.scheduled == request.arrival == 3.0
    assert request.met


@pytest.mark.parametrize("caching", [True, False])
def test_a_shared_prefix_is_computed_once(caching: bool) -> None:
    config = config_of(prefix_caching=caching)
    prompts = [RandomPrompt(2100, name, (1, 2, 3, 4), 500) for name in ("first", "second")]
    load = OpenLoop([PlannedRequest(prompt, 2, 60.0 * number) for number, prompt in enumerate(prompts)])
    first, second = (seen.tokens[0] - seen.arrival for seen in simulate(config, machine_of(config), load).requests)
    assert second < 0.3 * first if caching else second == pytest.approx(first)


loads = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 3000), st.integers(1, 40)).map(lambda args: planned(*args)), max_size=25
)


@settings(max_examples=25, deadline=None)
@given(loads, st.sampled_from(sorted(POLICIES)), st.integers(1, 3), st.integers(1, 2), st.sampled_from([0.0, 0.2]))
def test_everybody_gets_all_tokens_in_order(
    load: list[PlannedRequest], policy: str, groups: int, overlap: int, sigma: float
) -> None:
    config = config_of(policy, groups=groups, overlap=overlap, max_running=8, num_blocks=20, chunk_size=300)
    machine = machine_of(config)
    run = simulate(config, machine, OpenLoop(load), Noise(sigma))
    assert len(run.requests) == len(load)
    for request in run.requests:
        times = list(request.tokens)
        assert request.refused is None
        assert len(times) == request.planned.output_tokens or request.lost == "kv_capacity"
        assert times == sorted(times)
        assert request.arrival == pytest.approx(request.planned.at_s, abs=2e-9)
        assert request.scheduled is not None
        assert not times or times[0] > request.scheduled >= request.arrival
        assert request.ended is not None
        assert request.ended <= run.ended
    again = simulate(config, machine, OpenLoop(load), Noise(sigma))
    assert [list(r.tokens) for r in again.requests] == [list(r.tokens) for r in run.requests], "the same seed, the same"


def test_a_closed_loop_keeps_its_number_under_way() -> None:
    config = config_of()
    run = simulate(config, machine_of(config), ClosedLoop([planned(0, 600, 10) for _ in range(12)], 3))
    events = sorted([(r.arrival, 1) for r in run.requests] + [(r.ended or 0.0, -1) for r in run.requests])
    under_way = most = 0
    for _, step in events:
        under_way += step
        most = max(most, under_way)
    assert most == 3
    assert run.attainment == 1.0


def test_more_groups_share_the_load() -> None:
    load = OpenLoop([planned(0.001 * n, 2000, 20) for n in range(40)])
    one, four = (simulate(c, machine_of(c), load) for c in (config_of(groups=1), config_of(groups=4)))
    assert four.ended < one.ended / 2.5
    assert four.gpus == 4


def test_what_does_not_fit_is_refused_and_missed() -> None:
    config = config_of(max_model_len=1000)
    run = simulate(config, machine_of(config), OpenLoop([planned(0, 2000, 5), planned(0, 500, 5)]))
    assert [request.refused for request in run.requests] == ["context_length_exceeded", None]
    assert run.attainment == 0.5


def test_memory_decides_how_many_blocks_there_are() -> None:
    """A100-80: 0.9 x 80e9 - 2 x 8,030,261,248 bytes of weights, 131,072 bytes a token in blocks of 256."""
    machine = machine_of(config_of())
    assert machine.info.num_blocks == int((72e9 - 2 * 8_030_261_248) / (131_072 * 256))
    with pytest.raises(ValueError, match="take more --tp"):
        by_hardware(config_of(), known_shape("Llama-3.1-70B"), gpu("A100").hardware)
    with pytest.raises(ValueError, match="8 KV heads"):
        by_hardware(config_of(tp=16), known_shape("Llama-3.1-70B"), gpu("A100").hardware)


@given(st.integers(1, 300), st.lists(st.integers(0, 5), max_size=4), st.integers(1, 64))
def test_prompts_share_what_they_were_planned_to_share(tokens: int, blocks: list[int], size: int) -> None:
    one = prompt_tokens(PlannedRequest(RandomPrompt(tokens, "a", tuple(blocks), size), 1), 1)
    two = prompt_tokens(PlannedRequest(RandomPrompt(tokens, "b", tuple(blocks), size), 1), 2)
    common = min(tokens, len(blocks) * size)
    assert len(one) == len(two) == tokens
    assert one[:common] == two[:common]
    assert not set(one[common:]) & set(two[common:])


def test_a_request_is_promised_what_its_class_is() -> None:
    config = config_of("slo", slo_classes={"soon": {"ttft_ms": 90_000, "tpot_ms": 200}})
    asked = PlannedRequest(RandomPrompt(100, "asked"), 3, 0.0, extra={"slo": "soon"})
    run = simulate(config, machine_of(config), OpenLoop([planned(0.0, 100, 3), asked]))
    promised = [seen.promise for seen in run.requests]
    assert [(of.ttft_s, of.tpot_s) for of in promised if of is not None] == [(2.0, 0.05), (90.0, 0.2)]
