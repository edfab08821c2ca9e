"""`stallfree fetch`: have a model's files here before they are needed."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from deploy.errors import CommandError


def fetch(
    model: Annotated[str, typer.Argument(help="smollm2, a local directory, a .gguf file, or a hub id.")] = "smollm2",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Fetch a model, convert it where needed, and print where it is."""
    from workers.checkpoint import CheckpointError, resolve

    try:
        directory = resolve(model)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    print(json.dumps({"model": model, "directory": str(directory)}) if as_json else directory)
