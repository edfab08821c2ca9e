"""A server that runs as long as the command that started it: Ray, Serve, and the application on them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.config import EngineConfig
from deploy import preflight
from deploy.errors import CommandError
from deploy.lifetime import Lifetime
from deploy.ports import check_port

APPLICATION = "stallfree"

_LAST_WORDS = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Unavailable|Refused)): (.+)$", re.MULTILINE)
_PLAIN = ("ValueError", "CheckpointError", "EngineUnavailable")
"""Errors of ours, whose text is written for the one who reads it; others need their name to be understood."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. A client on this machine reaches a wildcard address by the loopback one."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"


def start(
    life: Lifetime,
    config: EngineConfig,
    address: Address,
    *,
    extra: dict[str, Any] | None = None,
    ray_address: str | None = None,
    say: Say = lambda line: None,
) -> Address:
    """Serve `config` until `life` ends, and return once it answers. `extra` are further arguments of the application.

    Raises CommandError, in one line, for whatever stands in the way; what can be checked is checked first.
    """
    from workers.checkpoint import CheckpointError, resolve

    address = Address(address.host, check_port(address.host, address.port))
    try:
        model_dir = resolve(config.model)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    if ray_address is None:
        preflight.check(config, model_dir)
    say(f"starting Ray{f' (cluster {ray_address})' if ray_address else ''}")
    _start_ray(life, ray_address)
    say(f"loading {config.model}")
    _start_serve(life, address, ray_address)
    _deploy({**config.model_dump(exclude_defaults=True), **(extra or {})})
    return address


def _start_ray(life: Lifetime, address: str | None) -> None:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if address is None:
            # A cluster of this command's own, whatever RAY_ADDRESS says and whoever else runs one on this machine.
            os.environ.pop("RAY_ADDRESS", None)
            ray.init(
                address="local",
                include_dashboard=False,
                _temp_dir=str(life.directory),
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"reach the Ray cluster at {address}" if address else "start Ray"
        raise CommandError(f"cannot {where}: {(str(error) or type(error).__name__).splitlines()[0]}") from None
    life.on_close(ray.shutdown)


def _start_serve(life: Lifetime, address: Address, ray_address: str | None) -> None:
    """On a cluster of others Serve may be theirs: then only our application goes when we go."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    from ray import serve
    from ray.serve.config import HTTPOptions

    if ray_address is not None and _serve_runs():
        life.on_close(lambda: serve.delete(APPLICATION))
    else:
        life.on_close(serve.shutdown)
    serve.start(http_options=HTTPOptions(host=address.host, port=address.port))


def _serve_runs() -> bool:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _deploy(arguments: dict[str, Any]) -> None:
    from ray import serve

    from deploy.app import build_app

    try:
        application = build_app(arguments)
        serve.run(application, name=APPLICATION, route_prefix="/")
    except ValueError as error:
        raise CommandError(str(error), 2) from None
    except RuntimeError as error:
        raise CommandError(_cause(str(error))) from None


def _cause(otherwise: str) -> str:
    """The application's own words, out of the nested traceback that Serve keeps of a replica that did not start."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    messages = [deployment.message for deployment in application.deployments.values()] if application else []
    for message in messages:
        if said := _LAST_WORDS.findall(message):
            kind, text = said[-1]
            return str(text) if kind in _PLAIN else f"{kind}: {text}"
    return otherwise
