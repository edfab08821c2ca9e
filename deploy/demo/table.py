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
    """The comparison in a sentence: how much shorter the largest gap is than at its worst, and what that costs."""
    worst = max(phases, key=lambda phase: figures(phase).gap_max_s)
    high = figures(worst)
    others = [_against(high, phase) for phase in phases if phase is not worst]
    stall = f"Under {worst.policy} running streams stood still for up to {seconds(high.gap_max_s)}"
    return "; ".join([stall, *others]) + "."


def _against(high: Figures, phase: PhaseRecord) -> str:
    low = figures(phase)
    later = low.ttft_long_s / high.ttft_long_s - 1
    return (
        f"under {phase.policy} for {seconds(low.gap_max_s)} at most ({high.gap_max_s / low.gap_max_s:.1f} times "
        f"shorter), and the long prompt's first token came {abs(later):.0%} {'later' if later > 0 else 'sooner'}"
    )
