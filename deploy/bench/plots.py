"""A run's plots, as the plain data that Plotly draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from deploy.bench.figures import Figures
from deploy.bench.record import RequestRecord, RunRecord

Plot = dict[str, Any]

COLOURS = ("#1f6feb", "#d29922", "#8250df", "#1a7f37", "#cf222e", "#bf3989", "#0a7ea4", "#9a6700", "#6e7781")
STALL = "#cf222e"
CDF_POINTS = 500
SAMPLE = 40
"""Requests whose tokens are drawn one by one; more would be a grey block."""
BINS = 60


def plots(run: RunRecord, found: Figures, skip_s: float = 0.0) -> list[Plot]:
    """Figures of CDFs are of what was counted; the timelines show the whole run."""
    counted = [record for record in run.requests if record.due_s >= skip_s]
    slo = found.slo
    return [
        _cdf("Time to first token", counted, lambda record: [record.ttft_s], slo.ttft_s),
        _cdf("Time between tokens (ITL)", counted, lambda record: record.gaps, slo.tbt_s or slo.tpot_s),
        _timeline(run.requests),
        _load(run),
    ]


def _cdf(
    title: str,
    records: Sequence[RequestRecord],
    values: Callable[[RequestRecord], Iterable[float | None]],
    promised_s: float | None,
) -> Plot:
    """One curve for each kind."""
    kinds = sorted({record.kind for record in records})
    seen = {kind: [value for r in records if r.kind == kind for value in values(r)] for kind in kinds}
    return cdf(title, seen, promised_s)


def cdf(
    title: str,
    seen: Mapping[str, Iterable[float | None]],
    promised_s: float | None = None,
    styles: Mapping[str, dict[str, str]] | None = None,
) -> Plot:
    """One curve for each name: which share of its values (seconds) is at most so large. `styles`: of lines, by name."""
    traces = []
    for number, (name, values) in enumerate(seen.items()):
        known = [value for value in values if value is not None]
        if not known:
            continue
        known.sort()
        counts = np.linspace(1, len(known), min(CDF_POINTS, len(known))).round().astype(int).tolist()
        times = [_ms(known[0]), *(_ms(known[count - 1]) for count in counts)]
        told = [0.0, *(round(count / len(known), 4) for count in counts)]
        style = (styles or {}).get(name, {"color": colour_of(number)})
        traces.append(lines_of(f"{name} (n {len(known):,})", times, told, {**style, "shape": "hv"}))
    plot = plot_of(title, traces, "ms", "share")
    if promised_s is not None:
        plot["layout"]["shapes"] = [
            {"type": "line", "x0": promised_s * 1e3, "x1": promised_s * 1e3, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"color": STALL, "dash": "dot"}}
        ]  # fmt: skip
    return plot


def _timeline(records: Sequence[RequestRecord]) -> Plot:
    chosen = sample(records)
    title = f"Tokens of {len(chosen)} of {len(records)} requests" if len(chosen) < len(records) else "Tokens"
    return timeline(title, chosen)


def timeline(title: str, chosen: Sequence[RequestRecord], between: tuple[float, float] | None = None) -> Plot:
    """A row for each request: waiting until the first token as a line, then a mark for each token. `between`: seconds
    of the run that are shown, otherwise all that there are."""
    traces = []
    for number, kind in enumerate(sorted({record.kind for record in chosen})):
        rows = [(row, record) for row, record in enumerate(chosen) if record.kind == kind]
        waits = [(record.sent_s, record.tokens[0] if record.tokens else record.ended_s) for _, record in rows]
        wait_x = [when for start, end in waits for when in (_s(start), _s(end), None)]
        wait_y = [place for row, _ in rows for place in (row, row, None)]
        waiting = lines_of(f"{kind}, waiting", wait_x, wait_y, {"color": colour_of(number), "width": 4})
        waiting["opacity"] = 0.35
        token_x = [_s(when) for _, record in rows for when in record.tokens]
        token_y = [row for row, record in rows for _ in record.tokens]
        marker = {"color": colour_of(number), "symbol": "line-ns-open", "size": 8}
        tokens = {"type": "scatter", "mode": "markers", "x": token_x, "y": token_y, "marker": marker}
        traces += [waiting, {**tokens, "name": f"{kind}, tokens"}]
    plot = plot_of(title, traces, "s", "request")
    plot["layout"]["yaxis"]["range"] = [len(chosen) - 0.5, -0.5]  # the first one on top, and none of them cut
    if between is not None:
        plot["layout"]["xaxis"]["range"] = [_s(when) for when in between]
    return plot


def sample(records: Sequence[RequestRecord], most: int = SAMPLE) -> list[RequestRecord]:
    """At most so many, evenly from all, with the first and the last of them."""
    if len(records) <= most:
        return list(records)
    return [records[round(index * (len(records) - 1) / (most - 1))] for index in range(most)]


def _load(run: RunRecord) -> Plot:
    """Requests under way as steps, arrivals and tokens a second as bars and a line over equal times."""
    running_x, running_y = running(run.requests)
    end = max((record.ended_s for record in run.requests), default=0.0)
    traces = [lines_of("running", running_x, running_y, {"color": COLOURS[0], "shape": "hv"})]
    if end > 0:
        width = end / BINS
        middles = [_s((index + 0.5) * width) for index in range(BINS)]
        sent, _ = np.histogram([record.sent_s for record in run.requests], BINS, (0, end))
        came, _ = np.histogram([when for record in run.requests for when in record.tokens], BINS, (0, end))
        arrivals = {"type": "bar", "name": "arrivals a second", "x": middles, "y": _rates(sent, width), "opacity": 0.4}
        traces += [
            {**arrivals, "marker": {"color": COLOURS[1]}},
            {**lines_of("tokens a second", middles, _rates(came, width), {"color": COLOURS[3]}), "yaxis": "y2"},
        ]
    plot = plot_of("Load over time", traces, "s", "requests")
    plot["layout"]["yaxis2"] = {"title": {"text": "tokens/s"}, "overlaying": "y", "side": "right", "showgrid": False,
                                "rangemode": "tozero"}  # fmt: skip
    return plot


def running(records: Sequence[RequestRecord]) -> tuple[list[float], list[int]]:
    """Times at which the number of requests under way changes, and the number from then on."""
    changes = sorted([(record.sent_s, 1) for record in records] + [(record.ended_s, -1) for record in records])
    counts = np.cumsum([change for _, change in changes]).tolist() if changes else []
    return [_s(when) for when, _ in changes], counts


def plot_of(title: str, traces: list[dict[str, Any]], x: str, y: str) -> Plot:
    grey = "rgba(128,128,128,0.25)"
    axis = {"gridcolor": grey, "zerolinecolor": grey, "rangemode": "tozero"}
    layout: dict[str, Any] = {
        "title": {"text": title},
        "xaxis": {"title": {"text": x}, **axis},
        "yaxis": {"title": {"text": y}, **axis},
        "legend": {"orientation": "h", "y": -0.2},
        "margin": {"t": 50, "r": 60},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "modebar": {"bgcolor": "rgba(0,0,0,0)"},
        "font": {"color": "#7d8590"},
    }
    return {"data": traces, "layout": layout}


def lines_of(name: str, x: Sequence[Any], y: Sequence[Any], line: dict[str, Any]) -> dict[str, Any]:
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": line}


def _rates(counts: Any, width: float) -> list[float]:
    return [round(int(count) / width, 3) for count in counts]


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _ms(seconds: float) -> float:
    return round(float(seconds) * 1e3, 3)


def _s(seconds: float) -> float:
    return round(float(seconds), 4)
