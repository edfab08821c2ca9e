"""`stallfree trace`: what the scheduler decided, as a trace that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.errors import CommandError

PAGE = 1000


def trace(
    source: Annotated[str, typer.Argument(help="URL of a running server, or a file written by --iteration-log.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the trace goes.")] = Path("trace.json"),
    iterations: Annotated[int, typer.Option(help="Most iterations, the latest ones.", min=1)] = 4096,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The trace itself on standard output, no file.")] = False,
) -> None:
    """Export the decision log as a Chrome trace: a track for each request, and the budget."""
    from deploy.output import Output
    from deploy.trace import chrome_trace

    out = Output(as_json)
    entries = _from_server(source, iterations, api_key) if "://" in source else _from_file(Path(source), iterations)
    if not entries:
        raise CommandError(f"{source} has no iterations; send it a request first")
    try:
        made = chrome_trace(entries)
    except ValueError as error:
        raise CommandError(f"{source}: {error}") from None
    if as_json:
        out.json(made)
        return
    try:
        output.write_text(json.dumps(made))
    except OSError as error:
        raise CommandError(f"cannot write {output}: {error.strerror or error}") from None
    requests = len({event["tid"] for event in made["traceEvents"] if event["ph"] == "X" and event["pid"] == 1})
    out.text(f"{output}: {len(entries):,} iterations, {requests:,} requests; open it in https://ui.perfetto.dev")


def _from_server(url: str, iterations: int, api_key: str | None) -> list[dict[str, Any]]:
    import httpx

    base = url.rstrip("/").removesuffix("/v1")
    entries: list[dict[str, Any]] = []
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=60, trust_env=False) as client:
            after = max(0, _last_seq(_page(client, -1, 1)) - iterations)
            while len(entries) < iterations and (page := _page(client, after, min(PAGE, iterations - len(entries)))):
                entries += page
                after = _last_seq(page)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"no answer from {url}: {str(error) or type(error).__name__}") from None
    return entries


def _page(client: Any, after: int, limit: int) -> list[dict[str, Any]]:
    response = client.get("/v1/stallfree/iterations", params={"after": after, "limit": limit})
    try:
        data = response.json()["data"] if response.status_code == 200 else None
    except (ValueError, KeyError, TypeError):
        data = None
    if not isinstance(data, list):
        raise CommandError(f"{client.base_url} has no decision log (status {response.status_code}); is it Stallfree?")
    return data


def _last_seq(entries: list[dict[str, Any]]) -> int:
    return int(entries[-1]["seq"]) if entries else 0


def _from_file(path: Path, iterations: int) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise CommandError(f"cannot read {path}: {reason}", 2) from None
    first = max(0, len(lines) - iterations)
    for number, line in enumerate(lines[first:], start=first + 1):
        try:
            entries.append(json.loads(line))
        except (ValueError, RecursionError):
            if number < len(lines):  # the last line of a server that still runs may be half written
                raise CommandError(f"{path}, line {number}: not JSON", 2) from None
    return entries
