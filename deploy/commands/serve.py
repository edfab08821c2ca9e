"""`stallfree serve`: the server, until a signal ends it."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def serve(
    *,
    engine: dict[str, str],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.", min=0, max=65535)] = 8000,
    replicas: Annotated[int, typer.Option(help="API replicas.", min=1)] = 1,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may go on after SIGTERM or Ctrl-C.", min=0)
    ] = 2.0,
    ray_address: Annotated[
        str | None, typer.Option(help="An existing Ray cluster (host:port or auto). \\[default: start a local one]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on standard output when ready.")] = False,
) -> None:
    """Serve a model with the OpenAI API."""
    from deploy.lifetime import Lifetime

    with Lifetime() as life:
        from deploy import running
        from deploy.options import engine_config
        from deploy.output import Output, mute

        config = engine_config(engine)
        output = Output(as_json)
        server = life.run(
            lambda: running.start(
                life,
                config,
                running.Address(host, port),
                extra={"replicas": replicas},
                ray_address=ray_address,
                say=output.progress,
            )
        )
        output.text(describe(server))
        output.json(facts(server))
        life.on_close(mute)
        life.extra_seconds = drain_seconds
        life.on_close(lambda: server.drain(drain_seconds))
        life.on_close(lambda: output.progress("stopping"))
        life.wait()


def facts(server: Any) -> dict[str, Any]:
    return {}


def describe(server: Any) -> str:
    return ""
