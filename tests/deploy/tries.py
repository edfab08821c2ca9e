"""How many requests of a generator are tried on a server, and how."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def tries(examples: int) -> settings:
    """The same ones every time, unless they are many."""
    return settings(
        max_examples=examples,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=examples < 1000,
    )
