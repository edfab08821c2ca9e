"""`stallfree serve`: the server, until a signal ends it."""

from __future__ import annotations

import ipaddress
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.errors import CommandError

if TYPE_CHECKING:
    from cluster.engine import EngineInfo
    from deploy.api.keys import Key
    from deploy.running import Server

KEY_VARIABLE = "STALLFREE_API_KEY"


def serve(
    *,
    engine: dict[str, str],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 for a free one.", min=0, max=65535)] = 8000,
    replicas: Annotated[int, typer.Option(help="API replicas.", min=1)] = 1,
    drain_seconds: Annotated[
        float, typer.Option(help="How long running requests may go on after SIGTERM or Ctrl-C.", min=0)
    ] = 2.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            show_envvar=True,
            help="A key that clients have to send; repeatable, or with commas.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="Keys as lines name:sha256; see `stallfree key`.", dir_okay=False)
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="An existing Ray cluster (host:port or auto). \\[default: start a local one]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line on standard output when ready.")] = False,
) -> None:
    """Serve a model with the OpenAI API."""
    from deploy.lifetime import Lifetime

    keys = _keys(api_key or [], api_key_file)
    with Lifetime() as life:
        from deploy import running
        from deploy.options import engine_config
        from deploy.output import Output, mute

        config = engine_config(engine)
        output = Output(as_json)
        _forget_secrets()
        server = life.run(
            lambda: running.start(
                life,
                config,
                running.Address(host, port),
                extra={"replicas": replicas, "drain_seconds": drain_seconds, "api_keys": keys},
                ray_address=ray_address,
                say=output.progress,
            )
        )
        for warning in warnings(host, keys, api_key or []):
            output.progress(f"warning: {warning}")
        life.on_close(mute)
        life.extra_seconds = drain_seconds
        life.on_close(lambda: server.drain(drain_seconds))
        life.on_close(lambda: output.progress("stopping"))
        output.text(describe(server))
        output.json(facts(server))
        threading.Thread(target=server.tell_incidents, args=(life.stopped, output.progress), daemon=True).start()
        life.wait()


def warnings(host: str, keys: Sequence[Key], given: Sequence[str]) -> Iterator[str]:
    """What an operator may not be aware of: that others than this machine can use the server, or guess a key."""
    from deploy.api.keys import SHORTEST_SOUND

    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not keys and not loopback:
        yield f"anybody who reaches {host} can use this server; --api-key or --api-key-file asks for a key"
    if any(len(secret.strip()) < SHORTEST_SOUND for text in given for secret in text.split(",")):
        yield f"an --api-key of less than {SHORTEST_SOUND} characters can be guessed; `stallfree key` makes better ones"


def _keys(given: Sequence[str], file: Path | None) -> tuple[Key, ...]:
    """Raises CommandError, which never repeats a key."""
    from deploy.api.keys import Key, read_keys

    secrets = [secret.strip() for text in given for secret in text.split(",")]
    try:
        keys = tuple(Key.of(f"key-{number}", secret) for number, secret in enumerate(secrets, 1))
    except ValueError as error:
        raise CommandError(f"--api-key: {error}", 2) from None
    try:
        return keys if file is None else (*keys, *read_keys(file))
    except ValueError as error:
        raise CommandError(f"--api-key-file: {error}", 2) from None


def _forget_secrets() -> None:
    """Before Ray starts, which writes down the command line of who started it, and whose processes inherit the
    environment. The new title is also what `ps` shows from now on."""
    from ray import _raylet

    os.environ.pop(KEY_VARIABLE, None)
    _raylet.setproctitle("stallfree serve")  # type: ignore[attr-defined]  # a module that is not Python


def facts(server: Server) -> dict[str, Any]:
    """What a program that started the server wants to know."""
    info, left_out = server.info, ("model", "served_model_name", "outlook")
    return {
        "ready": True,
        "url": server.address.url,
        "model": info.served_model_name,
        **{name: value for name, value in asdict(info).items() if name not in left_out},
        "promises": None if info.outlook is None else info.outlook.as_json(),
        "kv_tokens": info.num_blocks * info.block_size,
    }


def describe(server: Server) -> str:
    """The same for a person."""
    from cluster.outlook import describe as describe_outlook
    from cluster.sizing import describe_pool, size

    info = server.info
    chunk = f", chunk size {info.chunk_size}" if info.policy in ("chunked", "alternate") else ""
    kv_dtype = "" if info.kv_dtype == info.dtype else f" with KV in {info.kv_dtype}"
    promised = {} if info.outlook is None else describe_outlook(info.outlook)
    lines = {
        "model": f"{info.served_model_name} ({info.model_dir})",
        "runs on": f"{info.device}, {info.dtype}{kv_dtype}, {info.attention} attention",
        "workers": f"{_groups(info)}, plans by {info.transport}",
        "policy": f"{info.policy}{chunk}",
        "KV pool": describe_pool(info.num_blocks, info.block_size, info.max_model_len),
        "memory": f"{size(info.iteration_bytes)} beside weights and KV for a group's largest iteration",
        **({} if not info.swap_blocks else {"swap": f"{info.swap_blocks:,} blocks of host memory"}),
        **promised,
        "ready": f"{server.address.url}/v1",
    }
    return "\n".join(f"{name:<8} {text}" for name, text in lines.items())


def _groups(info: EngineInfo) -> str:
    if info.mode == "colocated":
        return f"{info.groups} x {info.tp}"
    prefill, decode = f"{info.prefill_groups} x {info.prefill_tp}", f"{info.decode_groups} x {info.decode_tp}"
    return f"{prefill} for prompts, {decode} for streams"
