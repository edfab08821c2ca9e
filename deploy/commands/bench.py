"""`stallfree bench`: load on any server with the OpenAI API, and what came of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.errors import CommandError

if TYPE_CHECKING:
    from cluster.workloads import Workload
    from deploy.bench import RunRecord, SloTargets, Target
    from deploy.output import Output


def bench(
    url: Annotated[str | None, typer.Argument(help="The server, such as http://127.0.0.1:8000.")] = None,
    *,
    load: dict[str, Any],
    workload: Annotated[
        str, typer.Option(help="poisson, gamma, ramp, concurrency, interference or trace.")
    ] = "poisson",
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    warmup: Annotated[int, typer.Option(help="Requests before the run, not recorded.", min=0, max=100_000)] = 0,
    skip: Annotated[float, typer.Option(help="Seconds at the run's beginning that are not counted.", min=0)] = 0,
    slo: Annotated[str | None, typer.Option(help="ttft_ms=2000,tpot_ms=100,tbt_ms=300, each optional.")] = None,
    send_slo: Annotated[bool, typer.Option("--send-slo", help="Also send it in every request.")] = False,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    model: Annotated[str | None, typer.Option(help="[the server's first]")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True)] = None,
    extra_body: Annotated[str, typer.Option(help="JSON object that goes into every request.")] = "{}",
    timeout: Annotated[
        float, typer.Option(help="Seconds that a request may go without a byte.", min=0.001, max=86400)
    ] = 300,
    output: Annotated[
        Path | None, typer.Option(help="Also write the figures as JSON to this file.", dir_okay=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Put every token's time into the JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write a report to this file.", dir_okay=False)] = None,
    diff: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Compare two files of --output instead.", metavar="A.json B.json")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on standard output.")] = False,
) -> None:
    """Put load on a server and say how it bore it, or compare two runs."""
    from deploy.output import Output, check_file

    if diff is not None:
        if url is not None:
            raise CommandError("--diff compares two files and takes no URL", 2)
        _diff(diff, Output(as_json))
        return
    if url is None:
        raise CommandError("a URL is missing, such as http://127.0.0.1:8000", 2)
    check_file("--output", output)
    check_file("--html", html)

    from deploy.bench.slo import SloTargets, parse_slo
    from deploy.bench.target import Target
    from deploy.bench.wanted import Wanted, description, plan_of

    wanted = Wanted(**load)
    try:
        promised = SloTargets() if slo is None else parse_slo(slo)
        if send_slo and not promised:
            raise ValueError("--send-slo needs --slo")
        extra = {**_object(extra_body), **({"slo": promised.as_body()} if send_slo else {})}
        target = Target(url, model, api_key, endpoint, extra, timeout)  # type: ignore[arg-type]  # checked by it
        plan = plan_of(workload, wanted, seed)
    except ValueError as error:
        raise CommandError(str(error), 2) from None
    written = Output(as_json)
    run = _driven(target, plan, warmup)
    run.facts.update(description(workload, wanted, seed), warmup=warmup)
    _report(run, promised, skip, written, output, html, raw)
    if run.interrupted:
        raise typer.Exit(130)


def _driven(target: Target, workload: Workload, warmup: int) -> RunRecord:
    """Ctrl-C ends the run and keeps what was seen; a second one ends the command."""
    import asyncio
    import signal
    from contextlib import suppress

    from deploy.bench import loop
    from deploy.bench.bar import ProgressBar
    from deploy.bench.drive import drive

    async def run() -> RunRecord:
        stop, running = asyncio.Event(), asyncio.get_running_loop()

        def interrupt() -> None:
            stop.set()
            running.remove_signal_handler(signal.SIGINT)

        with suppress(NotImplementedError, RuntimeError, ValueError):  # no signals on Windows, and in other threads
            running.add_signal_handler(signal.SIGINT, interrupt)
        return await drive(target, workload, progress=bar.update, warmup=warmup, stop=stop)

    with ProgressBar() as bar:
        return loop.run(run())


def _report(
    run: RunRecord, slo: SloTargets, skip: float, written: Output, output: Path | None, html: Path | None, raw: bool
) -> None:
    from rich.console import Console

    from deploy.bench.figures import figures
    from deploy.bench.report import as_json
    from deploy.bench.show import show

    found = figures(run, slo, skip_s=skip)
    content = as_json(run, found, raw=raw)
    if output is not None:
        _write(output, json.dumps(content, indent=1) + "\n")
        written.progress(f"wrote {output}")
    if html is not None:
        from deploy.bench.html import page

        _write(html, page(run, found, skip))
        written.progress(f"wrote {html}")
    if written.as_json:
        written.json(content)
    else:
        show(Console(file=written.results), run, found)


def _diff(files: tuple[Path, Path], written: Output) -> None:
    from rich.console import Console

    from deploy.bench.diff import as_table, compare, diff_json, read_run

    rows = compare(*(read_run(file) for file in files))
    if written.as_json:
        written.json(diff_json(rows))
    else:
        written.text(f"A: {files[0]}\nB: {files[1]}")
        Console(file=written.results).print(as_table(rows))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{file} cannot be written: {error.strerror}") from None


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"--extra-body is no JSON object: {text!r}")
    return found
