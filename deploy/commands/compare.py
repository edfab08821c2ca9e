"""`stallfree compare`: every way to schedule on equal resources under the same load, one after another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.errors import CommandError

if TYPE_CHECKING:
    from deploy.bench.bar import ProgressBar
    from deploy.compare.comparison import Comparison, Plan
    from deploy.compare.runner import WatchAs
    from deploy.lifetime import Lifetime
    from deploy.output import Output

OF_CONFIGURATIONS = ("policy", "mode", "prefill_groups", "decode_groups", "prefill_tp", "decode_tp", "prefill_policy")
LEFT_OUT = frozenset({*OF_CONFIGURATIONS, "served_model_name", "slo_classes", "iteration_log"})
"""Fields of the configuration that each of those compared has of its own, or that make no difference."""
GROUPS = "2"
"""Fewer cannot be separated."""
CLOSING_S = 20.0
"""For the last engine to be taken down, so that a slow machine does not lose the exit code to that."""


def compare(
    *,
    engine: dict[str, str],
    load: dict[str, Any],
    configurations: Annotated[
        str, typer.Option(help="What to compare, with commas.")
    ] = "alternate,whole,chunked,slo,separated",
    chunk_sizes: Annotated[
        str, typer.Option(help="Of chunked, with commas; alternate takes the middle one.")
    ] = "64,128,256,512",
    splits: Annotated[
        str, typer.Option(help="Of separated: prefill:decode groups, with commas; else half and half.")
    ] = "",
    workload: Annotated[
        str, typer.Option(help="interference, poisson, gamma, ramp, concurrency or trace.")
    ] = "interference",
    rates: Annotated[
        str | None, typer.Option(help="Several, with commas: requests a second, or times a trace's pace.")
    ] = None,
    simulated: Annotated[
        str | None, typer.Option(help="On simulated GPUs, such as A100-80 or H100.", metavar="GPU")
    ] = None,
    weights: Annotated[str, typer.Option(help="--simulated: weight format.")] = "bf16",
    kv: Annotated[str, typer.Option(help="--simulated: KV format.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Also write a report to this file.", dir_okay=False)] = None,
    figures: Annotated[
        Path | None, typer.Option(help="Also write an SVG of each timeline to this folder.", file_okay=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Put every token's time into the JSON.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on standard output.")] = False,
) -> None:
    """Run one load under every way to schedule, and say which is right for it."""
    from deploy.bench.bar import ProgressBar
    from deploy.bench.wanted import Wanted
    from deploy.compare.asked import plan_asked
    from deploy.options import engine_config
    from deploy.output import Output, check_file

    check_file("--html", html)
    if figures is not None and not figures.is_dir():
        raise CommandError(f"--figures: there is no folder {figures}", 2)
    base = engine_config({"groups": GROUPS, **engine})
    try:
        plan = plan_asked(base, configurations, chunk_sizes, splits, workload, Wanted(**load), rates, seed)
        formats = (weights, kv)
        output = Output(as_json)
        with ProgressBar() as bar:
            if simulated is not None:
                found = _simulated(plan, simulated, formats, bar)
                _report(found, output, html, figures, raw)
            else:
                found = _served(plan, bar, lambda it: _report(it, output, html, figures, raw))
    except ValueError as error:
        raise CommandError(str(error), 2) from None
    if found.interrupted:
        raise typer.Exit(130)
    if not found.finished:
        raise typer.Exit(1)


def _simulated(plan: Plan, gpu: str, formats: tuple[str, str], bar: ProgressBar) -> Comparison:
    from deploy.compare.runner import compare as run
    from deploy.compare.simulated import simulated_on

    return run(plan, simulated_on(gpu, plan.base, *formats), say=bar.say, watch=_watched(bar))


def _served(plan: Plan, bar: ProgressBar, report: Any) -> Comparison:
    """On a Ray and Serve of its own. The report is made before they end, after which nothing is said any more."""
    from deploy.compare.comparison import Comparison
    from deploy.compare.runner import give_up
    from deploy.lifetime import Lifetime, Stopped
    from deploy.output import mute

    found = Comparison(plan)
    with Lifetime() as life:
        life.extra_seconds = CLOSING_S
        try:
            found = _on_ray(plan, life, bar)
        except Stopped:
            give_up(found)
        life.finish()
        report(found)
        life.on_close(mute)
    return found


def _on_ray(plan: Plan, life: Lifetime, bar: ProgressBar) -> Comparison:
    from deploy import running
    from deploy.compare.runner import compare as run
    from deploy.compare.served import ServedGround

    address = running.open_address(running.Address("127.0.0.1", 0))
    running.check(plan.base)
    life.run(lambda: running.begin(life, address, say=bar.say))
    return run(plan, ServedGround(address, bar.say, life.run), say=bar.say, watch=_watched(bar))


def _watched(bar: ProgressBar) -> WatchAs:
    def watch(name: str) -> Any:
        bar.title = name
        return bar.update

    return watch


def _report(found: Comparison, output: Output, html: Path | None, figures: Path | None, raw: bool) -> None:
    from rich.console import Console

    from deploy.compare.report import as_json
    from deploy.compare.show import show

    nothing = found.interrupted and not found.measured  # and what an earlier run has written stays
    try:
        if html is not None and not nothing:
            from deploy.compare.html import page

            html.write_text(page(found), encoding="utf-8")
            output.progress(f"wrote {html}")
        if figures is not None and not nothing:
            from deploy.compare.figure import write_figures

            output.progress(f"wrote {', '.join(str(file) for file in write_figures(found, figures))}")
    except OSError as error:
        raise CommandError(f"{error.filename} cannot be written: {error.strerror}") from None
    if output.as_json:
        output.json(as_json(found, raw=raw))
    else:
        show(Console(file=output.results), found)
