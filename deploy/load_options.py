"""Command line options of a load: one for each field of `deploy.bench.wanted.Wanted`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

_PANEL = "Load"
OPTIONS: dict[str, tuple[Any, Any]] = {
    "rate": (str, {"help": "Requests a second; a ramp's first and last, 1:8. [1]"}),
    "duration": (float, {"help": "Seconds in which requests arrive. [30]", "min": 0}),
    "burstiness": (float, {"help": "gamma: 1 is Poisson, below 1 bursts, above 1 a steady beat. [0.5]", "min": 0}),
    "concurrency": (int, {"help": "concurrency: requests under way. [8]", "min": 1}),
    "requests": (int, {"help": "concurrency: requests in all. [64]", "min": 1, "max": 1_000_000}),
    "streams": (int, {"help": "interference: streams that run when the long prompt comes. [8]", "min": 1, "max": 4096}),
    "long": (int, {"help": "interference: tokens of the long prompt. [2048]", "min": 1, "max": 1 << 20}),
    "trace": (Path, {"help": "trace: a file in Azure's CSV or Mooncake's JSONL format.", "dir_okay": False}),
    "rate_scale": (float, {"help": "trace: so many times as fast. [1]"}),
    "length_scale": (float, {"help": "trace: so many times as long. [1]"}),
    "max_requests": (int, {"help": "trace: the first so many requests.", "min": 1}),
    "max_prompt": (int, {"help": "trace: prompts are cut to this.", "min": 1}),
    "max_output": (int, {"help": "trace: outputs are cut to this.", "min": 1}),
    "prompt_tokens": (str, {"help": "512, 64:1024 (uniform) or lognormal:512:0.8. [256; 16 for interference]"}),
    "output_tokens": (str, {"help": "Likewise. [64; 1024 for interference]"}),
    "shared_prefix": (int, {"help": "Tokens that all prompts begin with, on top of theirs.", "min": 0, "max": 1 << 20}),
}
"""By the field of `Wanted`: its type, and what Typer is told of it."""


def with_load_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as a typer command that also takes these, and gets them by field in its keyword argument `load`."""

    def command(**given: Any) -> Any:
        return function(load={name: given.pop(name) for name in OPTIONS}, **given)

    signature = inspect.signature(function, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "load"]
    added = [_parameter(name, kind, settings) for name, (kind, settings) in OPTIONS.items()]
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    return command


def _parameter(name: str, kind: Any, settings: dict[str, Any]) -> inspect.Parameter:
    annotation = Annotated[kind | None, typer.Option(rich_help_panel=_PANEL, **settings)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
