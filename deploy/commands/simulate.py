"""`stallfree simulate`: a load on GPUs that nobody here has, under the scheduler that serves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.errors import CommandError

if TYPE_CHECKING:
    from cluster.simulated.seen import Simulation
    from deploy.bench.figures import Figures
    from deploy.bench.record import RunRecord
    from deploy.simulation.asked import Asked

LEFT_OUT = frozenset(
    {
        *("served_model_name", "device", "dtype", "kv_dtype", "attention", "transport", "threads", "slo_classes"),
        *("preempt", "swap_memory"),
        *("profile_seconds", "iterations_kept", "iteration_log"),
    }
)
"""Fields of the configuration that only workers and servers have."""
DURATION_S = 120.0
"""For which requests arrive where nothing else was said: simulated time costs little."""
BOUNDS = ("--attainment", "--p99-tbt-ms", "--delay-ms")
KINDS = {"--gpus": "A100-80,H100", "--tps": "1,2,4", "--policies": "chunked,slo"}
MOST_GPUS = 1024
"""What --find-cheapest compares where nothing else was said."""


def simulate(
    *,
    engine: dict[str, str],
    load: dict[str, Any],
    gpu: Annotated[str | None, typer.Option(help="A known GPU, such as A100-80 or H100.")] = None,
    weights: Annotated[str, typer.Option(help="Weight format: bf16, fp32, fp8, int4, ...")] = "bf16",
    kv: Annotated[str, typer.Option(help="KV format.")] = "bf16",
    peak_tflops: Annotated[float | None, typer.Option(help="Of a GPU not in the table.")] = None,
    bandwidth_tbps: Annotated[float | None, typer.Option(help="Memory bandwidth in TB/s, likewise.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Memory, likewise. [80]", min=0.001)] = None,
    link_gbps: Annotated[float, typer.Option(help="GB/s between GPUs, likewise.", min=0.001)] = 25,
    calibration: Annotated[
        Path | None, typer.Option(help="A server's own micro-profile, instead of --gpu.", dir_okay=False)
    ] = None,
    noise: Annotated[float, typer.Option(help="Spread (sigma) of iteration times; 0: exact.", min=0, max=2)] = 0,
    workload: Annotated[
        str, typer.Option(help="poisson, gamma, fixed, ramp, trace, concurrency or interference.")
    ] = "poisson",
    lengths: Annotated[
        Path | None, typer.Option(help="CSV of prompt and output lengths to draw from.", dir_okay=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and noise.")] = 0,
    seeds: Annotated[
        int | None, typer.Option(help="--find-capacity: searches over so many seeds. [1]", min=1, max=100)
    ] = None,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Find the highest rate that is carried.")
    ] = False,
    find_cheapest: Annotated[
        bool, typer.Option("--find-cheapest", help="Find the fewest GPUs that carry the load.")
    ] = False,
    attainment: Annotated[float | None, typer.Option(help="Share that must get what is promised. [0.9]")] = None,
    p99_tbt_ms: Annotated[float | None, typer.Option(help="Or: bound on the P99 time between tokens.")] = None,
    delay_ms: Annotated[float | None, typer.Option(help="And: on the median scheduling delay. [2000]")] = None,
    gpus: Annotated[str | None, typer.Option(help="--find-cheapest: GPUs to compare. \\[A100-80,H100]")] = None,
    tps: Annotated[str | None, typer.Option(help="--find-cheapest: tensor-parallel degrees. \\[1,2,4]")] = None,
    policies: Annotated[str | None, typer.Option(help="--find-cheapest: policies. \\[chunked,slo]")] = None,
    prices: Annotated[
        Path | None, typer.Option(help='--find-cheapest: JSON such as {"H100": 4}, money an hour.', dir_okay=False)
    ] = None,
    most_gpus: Annotated[
        int | None, typer.Option(help=f"--find-cheapest: the most GPUs to try. [{MOST_GPUS}]", min=1)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a report to this file.", dir_okay=False)] = None,
    totals: Annotated[
        bool, typer.Option("--totals", help="Keep no requests, so that memory does not grow with their number.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Put every token's time into the JSON.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Serve a load on simulated GPUs with the real scheduler: latencies, capacity, or the cheapest cluster."""
    from deploy.bench.wanted import Wanted
    from deploy.options import engine_config
    from deploy.output import Output, check_file
    from deploy.simulation.asked import Asked

    if find_capacity and find_cheapest:
        raise CommandError("--find-capacity and --find-cheapest are two questions; ask one", 2)
    bounds = (attainment, p99_tbt_ms, delay_ms)
    kinds = {"--gpus": gpus, "--tps": tps, "--policies": policies}
    if not (find_capacity or find_cheapest):
        _refuse(dict(zip(BOUNDS, bounds, strict=True)), "without --find-capacity or --find-cheapest")
    if not find_capacity:
        _refuse({"--seeds": seeds}, "without --find-capacity")
    if not find_cheapest:
        _refuse({**kinds, "--prices": prices, "--most-gpus": most_gpus}, "without --find-cheapest")
    check_file("--html", html)
    if totals and (find_capacity or find_cheapest or raw or html is not None):
        raise CommandError("--totals keeps no requests: it goes with no --raw, no --html and no search", 2)
    rated = workload not in ("trace", "concurrency", "interference")
    wanted = Wanted(**{**load, "duration": DURATION_S if rated and load["duration"] is None else load["duration"]})
    asked = Asked(
        config=engine_config(engine),
        gpu=gpu,
        formats=(weights, kv),
        peaks=(peak_tflops, bandwidth_tbps, memory_gb, link_gbps),
        calibration=calibration,
        workload=workload,
        wanted=wanted,
        lengths=lengths,
        noise=noise,
        seed=seed,
    )
    output = Output(as_json)
    try:
        if find_capacity:
            told, lines = _capacity(asked, range(seed, seed + (seeds or 1)), bounds, output)
        elif find_cheapest:
            compared = [given if given is not None else KINDS[flag] for flag, given in kinds.items()]
            told, lines = _cheapest(asked, compared, prices, most_gpus or MOST_GPUS, bounds, output)
        else:
            _once(asked, html, raw, totals, output)
            return
    except ValueError as error:
        raise CommandError(str(error), 2) from None
    output.json({**told, "asked": asked.facts()})
    for line in lines:
        output.text(line)


Bounds = tuple[float | None, float | None, float | None]
"""Attainment, P99 time between tokens and median scheduling delay in milliseconds, as given."""


def _refuse(options: dict[str, Any], where: str) -> None:
    """Raises CommandError for the first of these options that was given."""
    for flag, value in options.items():
        if value is not None:
            raise CommandError(f"{flag} has no meaning {where}", 2)


def _once(asked: Asked, html: Path | None, raw: bool, totals: bool, output: Any) -> None:
    from rich.console import Console

    from deploy.bench.report import as_json
    from deploy.bench.show import show
    from deploy.simulation.telling import engine_json, engine_lines

    simulation, wall_s, delay_s, run, found = _totalled(asked) if totals else _kept(asked)
    if html is not None:
        from deploy.bench.html import page

        html.write_text(page(run, found), encoding="utf-8")
        output.progress(f"wrote {html}")
    told = engine_json(simulation, delay_s, wall_s)
    if output.as_json:
        output.json({**as_json(run, found, raw=raw), "simulated": told})
        return
    show(Console(file=output.results), run, found)
    for line in engine_lines(told):
        output.text(line)


def _kept(asked: Asked) -> tuple[Simulation, float, float, RunRecord, Figures]:
    """The simulation, how many seconds it took here, its median scheduling delay, and the run with its figures."""
    from cluster.simulated.cluster import Noise, simulate
    from deploy.bench.figures import figures
    from deploy.simulation.telling import as_run, loop_of

    machine, load = asked.machine(), asked.load()
    started = time.perf_counter()
    simulation = simulate(asked.config, machine, load, Noise(asked.noise, asked.seed))
    wall_s = time.perf_counter() - started
    run = as_run(simulation, {**asked.facts(), "loop": loop_of(load)})
    return simulation, wall_s, simulation.delay_quantile(0.5), run, figures(run, asked.slo())


def _totalled(asked: Asked) -> tuple[Simulation, float, float, RunRecord, Figures]:
    """The same, without the requests."""
    from cluster.simulated.cluster import Noise, simulate_stream
    from deploy.simulation.totalled import told, totals_for

    slo, machine, stream = asked.slo(), asked.machine(), asked.stream()
    started = time.perf_counter()
    totals, simulation = simulate_stream(asked.config, machine, stream, Noise(asked.noise, asked.seed), totals_for(slo))
    wall_s = time.perf_counter() - started
    if not totals.requests:
        raise ValueError("no request comes in that time at that rate; raise --rate or --duration")
    run, found = told(totals, simulation, slo, {**asked.facts(), "loop": "open loop"})
    return simulation, wall_s, totals.delays.quantile(0.5), run, found


def _capacity(asked: Asked, seeds: range, bounds: Bounds, output: Any) -> tuple[dict[str, Any], list[str]]:
    from deploy.simulation.search import criterion_of, find_capacity
    from deploy.simulation.telling import capacity_json, capacity_lines

    criterion = criterion_of(*bounds)
    found = find_capacity(
        asked.config, asked.machine(), asked.by_rate(), criterion, seeds, asked.noise, output.progress
    )
    return {"capacity": capacity_json(found)}, capacity_lines(found)


def _cheapest(
    asked: Asked, kinds: Iterable[str], prices: Path | None, most_gpus: int, bounds: Bounds, output: Any
) -> tuple[dict[str, Any], list[str]]:
    from cluster.simulated.cluster import Noise
    from deploy.simulation.search import criterion_of, find_cheapest, kinds_of, read_prices
    from deploy.simulation.telling import offer_json, offer_lines

    if asked.calibration is not None or asked.gpu is not None:
        raise ValueError("--find-cheapest compares the GPUs of --gpus; leave out --gpu and --calibration")
    if asked.config.separated:
        raise ValueError("--find-cheapest compares colocated groups; leave out --mode separated")
    compared = kinds_of(*kinds)
    table = None if prices is None else read_prices(prices, compared)
    offers = find_cheapest(
        asked.config,
        asked.shape(),
        compared,
        asked.load(),
        criterion_of(*bounds),
        table,
        most_gpus,
        Noise(asked.noise, asked.seed),
        output.progress,
    )
    told = [offer_json(offer, priced=table is not None) for offer in offers]
    return {"cheapest": told[0] if told[0]["gpus"] else None, "offers": told}, offer_lines(told)
