"""`stallfree key`: a new API key, and the line of a key file that stands for it."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.errors import CommandError


def key(
    name: Annotated[str, typer.Argument(help="Whose it is; keys of one name are one tenant.")],
    *,
    weight: Annotated[float, typer.Option(help="Of the tenant among others that wait.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Both as JSON on standard output.")] = False,
) -> None:
    """Make an API key: the line for --api-key-file on standard output, the key itself on standard error, this once."""
    from deploy.api.keys import Key, new_secret
    from deploy.output import Output

    secret = new_secret()
    try:
        line = str(Key.of(name, secret, weight))
    except ValueError as error:
        raise CommandError(str(error), 2) from None
    output = Output(as_json)
    if not as_json:
        output.progress(secret)
    output.text(line)
    output.json({"name": name, "key": secret, "line": line})
