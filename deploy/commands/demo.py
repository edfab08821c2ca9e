"""`stallfree demo`: what a long prompt does to running streams, shown on a server that is really served."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.engine import EngineInfo

DEFAULT_POLICIES = "whole,chunked,slo"
CHUNK_SIZE = "128"
"""Small enough that a CPU's streams keep moving; the server's default is meant for GPUs."""


def demo(
    *,
    engine: dict[str, str],
    streams: Annotated[int, typer.Option(help="Streams that run when the long prompt comes.", min=1, max=64)] = 8,
    long: Annotated[int, typer.Option(help="Tokens of the long prompt.", min=16)] = 2048,
    policies: Annotated[str, typer.Option(help="Policies to compare, with commas.")] = DEFAULT_POLICIES,
    html: Annotated[Path | None, typer.Option(help="Also write a report to this file.", dir_okay=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON on standard output.")] = False,
) -> None:
    """Send a long prompt into running streams under each policy, and show what happens to them."""
    from deploy.lifetime import Lifetime

    with Lifetime() as life:
        from rich.console import Console

        from deploy import running
        from deploy.bench import loop
        from deploy.demo.html import report
        from deploy.demo.record import as_json_phase
        from deploy.demo.runner import fitting_load, parse_policies, run_phases
        from deploy.demo.show import show
        from deploy.options import engine_config
        from deploy.output import Output, check_file, mute

        names = parse_policies(policies)
        # Only an engine that starts with `slo` measures its iterations, which is what `slo` needs; it can take turns.
        config = engine_config({"chunk_size": CHUNK_SIZE, **engine, "policy": "slo" if "slo" in names else names[0]})
        check_file("--html", html)
        output = Output(as_json)
        server = life.run(lambda: running.start(life, config, running.Address("127.0.0.1", 0), say=output.progress))
        life.on_close(mute)
        load = fitting_load(Path(server.info.model_dir), streams, long, server.info.max_model_len)
        phases = loop.run(run_phases(server, load, names, config.chunk_size, output.progress))
        if html is not None:
            html.write_text(report(phases, _facts(server.info)), encoding="utf-8")
            output.progress(f"wrote {html}")
        if as_json:
            output.json({**_facts(server.info), "phases": [as_json_phase(phase) for phase in phases]})
        else:
            show(Console(file=output.results), phases)


def _facts(info: EngineInfo) -> dict[str, str]:
    return {
        "model": info.served_model_name,
        "device": info.device,
        "dtype": info.dtype,
        "attention": info.attention,
        "transport": info.transport,
        "workers": f"{info.groups} x {info.tp}",
    }
