"""A comparison as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from deploy.bench.html import document, places, table
from deploy.bench.plots import Plot, cdf, lines_of, plot_of, timeline
from deploy.compare.comparison import Compared, Comparison, Measured
from deploy.compare.excerpt import excerpt, window
from deploy.compare.report import TABLES, loads_of, notes, warnings
from deploy.compare.styles import styles
from deploy.compare.verdict import verdict

Runs = Sequence[tuple[Compared, Measured]]


def page(found: Comparison) -> str:
    about = " · ".join(f"{escape(name)}: {escape(value)}" for name, value in found.facts.items())
    warned = "\n".join(f'<p class="warning">{escape(warning)}</p>' for warning in warnings(found))
    told = "\n".join(f"<p>{escape(note)}</p>" for note in notes(found))
    parts = [f"<p><b>{escape(verdict(found))}</b></p>", f'<p class="note">{about}</p>', warned, told]
    drawn: list[Plot] = []
    goodput = goodput_by_rate(found)
    if goodput is not None:
        drawn.append(goodput)
        parts.append(places(1))
    for name, runs in loads_of(found):
        if not runs:
            continue
        title = f"<h2>{escape(name)}</h2>" if name else ""
        of_load = plots(found, runs)
        tables = (table(columns, [cells(*run) for run in runs]) for columns, cells in TABLES)
        parts += [title, *tables, places(len(of_load), len(drawn))]
        drawn += of_load
    return document("Ways to schedule, compared", "\n".join(parts), drawn)


def plots(found: Comparison, runs: Runs) -> list[Plot]:
    """CDFs with a curve for each configuration; a timeline of the same few requests for each."""
    slo = found.promised
    records = {compared.name: run.record.requests for compared, run in runs}
    ttft = {name: [record.ttft_s for record in seen] for name, seen in records.items()}
    gaps = {name: [gap for record in seen for gap in record.gaps] for name, seen in records.items()}
    tpot = {name: [record.tpot_s for record in seen] for name, seen in records.items()}
    few = {name: excerpt(seen) for name, seen in records.items()}
    shown = window(list(few.values()))
    timelines = [timeline(f"Tokens under {name}", seen, shown) for name, seen in few.items()]
    drawn = styles(found.plan.configurations)
    curves = [
        cdf("Time to first token", ttft, slo.ttft_s, drawn),
        cdf("Time between tokens (ITL)", gaps, slo.tbt_s, drawn),
        cdf("Time per output token (TPOT) of each request", tpot, slo.tpot_s, drawn),
    ]
    for plot in curves:  # a stall is many times a usual gap, and both have to be seen
        plot["layout"]["xaxis"]["type"] = "log"
    return [*curves, *timelines]


def goodput_by_rate(found: Comparison) -> Plot | None:
    """None where there are not several rates."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for compared in found.measured:
        seen = [(run.load.offered_per_s, run.figures.goodput_per_s) for run in compared.runs]
        known = [(rate, good) for rate, good in seen if rate is not None and good is not None]
        curves[compared.name] = sorted(known)
    if not any(len(points) > 1 for points in curves.values()):
        return None
    traces, drawn = [], styles(found.plan.configurations)
    for name, points in curves.items():
        rates, kept = [round(rate, 4) for rate, _ in points], [round(value, 4) for _, value in points]
        traces.append({**lines_of(name, rates, kept, drawn[name]), "mode": "lines+markers"})
    highest = max(rate for points in curves.values() for rate, _ in points)
    traces.append(lines_of("all that is offered", [0, highest], [0, highest], {"color": "#7d8590", "dash": "dot"}))
    return plot_of("Goodput against the offered rate", traces, "requests/s offered", "requests/s as promised")
