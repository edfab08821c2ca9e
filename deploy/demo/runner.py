"""The demonstration itself: one served model, and the same load into it under each policy in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

from cluster.config import PolicyName
from deploy.demo.load import make_load
from deploy.demo.measure import LONG_ANSWER, Load, run_phase, warm_up
from deploy.demo.record import PhaseRecord
from deploy.errors import CommandError
from deploy.running import Server

POLICIES: tuple[str, ...] = get_args(PolicyName)
CHUNKED = {"chunked", "alternate"}
"""Policies whose chunk size is a constant, which is worth saying."""


def parse_policies(text: str) -> list[str]:
    """Raises CommandError for a policy that there is not, or for none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in POLICIES]
    if unknown or not names:
        what = f"unknown policy {unknown[0]!r}" if unknown else "no policy"
        raise CommandError(f"--policies: {what}; choose from {', '.join(POLICIES)}", 2)
    return list(dict.fromkeys(names))


def fitting_load(model_dir: Path, streams: int, long: int, max_model_len: int) -> Load:
    """Raises CommandError where the model's context is too short for it."""
    load = make_load(model_dir, streams, long)
    needed = max(len(load.long) + LONG_ANSWER, len(load.prompts[0]) + load.tokens)
    if needed > max_model_len:
        raise CommandError(f"--long {long} needs a context of {needed} tokens, and the model has {max_model_len}", 2)
    return load


async def run_phases(
    server: Server, load: Load, policies: Sequence[str], chunk_size: int, say: Callable[[str], None]
) -> list[PhaseRecord]:
    """One phase a policy, on the same server, which changes its policy between them."""
    url, model = server.address.url, server.info.served_model_name
    say("warming up")
    await warm_up(url, model, load.long[: 2 * chunk_size])
    phases = []
    for policy in policies:
        say(f"{policy}: {len(load.prompts)} streams, then a prompt of {len(load.long):,} tokens into them")
        await asyncio.to_thread(server.configure, policy, chunk_size)
        phases.append(await run_phase(url, model, load, policy, chunk_size if policy in CHUNKED else None))
    return phases
