"""The figures of the phases side by side, as lines of text."""

from __future__ import annotations

from deploy.demo.record import Figures, PhaseRecord, figures

COLUMNS = (
    "policy",
    "TTFT of the long prompt",
    "TPOT of the streams",
    "median gap before",
    "median gap during",
    "largest gap",
    "tokens/s",
)


def cells(phase: PhaseRecord) -> tuple[str, ...]:
    """One row, in the order of COLUMNS."""
    found = figures(phase)
    return (
        phase.title,
        seconds(found.ttft_long_s),
        seconds(found.tpot_s),
        seconds(found.gap_before_s),
        seconds(found.gap_during_s),
        seconds(found.gap_max_s),
        f"{found.tokens_per_s:.1f}",
    )


def seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.0f} ms"


def verdict(phases: list[PhaseRecord]) -> str:
    """The comparison in one sentence: how much shorter the largest gap is, and what it costs the long prompt."""
    worst = max(phases, key=lambda phase: figures(phase).gap_max_s)
    best = min(phases, key=lambda phase: figures(phase).gap_max_s)
    high, low = figures(worst), figures(best)
    if worst is best or high.gap_max_s <= low.gap_max_s:
        return f"The largest gap of a running stream under {best.policy} was {seconds(low.gap_max_s)}."
    return (
        f"Under {worst.policy} the long prompt stalled running streams for up to {seconds(high.gap_max_s)}; "
        f"under {best.policy} no gap was longer than {seconds(low.gap_max_s)} "
        f"({high.gap_max_s / low.gap_max_s:.1f} times shorter), {_price(high, low)}."
    )


def _price(high: Figures, low: Figures) -> str:
    change = low.ttft_long_s / high.ttft_long_s - 1
    return f"and its first token came {abs(change):.0%} {'later' if change > 0 else 'sooner'}"
