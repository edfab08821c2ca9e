"""A server that runs as long as the command that started it: Ray, Serve, and the application on them."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config import EngineConfig
from cluster.engine import EngineInfo
from cluster.precedence import background_steps_back
from deploy import preflight
from deploy.errors import CommandError
from deploy.lifetime import Lifetime
from deploy.ports import check_answers, check_port
from scheduler.slo import Promise

APPLICATION = "stallfree"
SHUTTING_DOWN = "the server is shutting down"
LAST_WORDS_S = 0.5
"""For the API replicas to write the last events of streams."""
DRAIN_GRACE_S = 2.0
INCIDENTS_EVERY_S = 2.0

_HTTP_SECONDS = 60

_LAST_WORDS = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Unavailable|Refused)): (.+)$", re.MULTILINE)
_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-")
_PLAIN = ("ValueError", "CheckpointError", "TokenizerError", "EngineUnavailable")
"""Errors of ours, whose text is written for the one who reads it; others need their name to be understood."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. A client on this machine reaches a wildcard address by the loopback one."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class Server:
    """A running application, seen from the process that started it."""

    def __init__(self, address: Address) -> None:
        import ray
        from ray import serve

        engine = serve.get_deployment_handle("Engine", APPLICATION)
        try:
            name, namespace = engine.scheduler.remote().result(timeout_s=_HTTP_SECONDS)
        except TimeoutError:
            raise CommandError("the application runs, but its engine does not answer this process") from None
        self.address = address
        self._scheduler: Any = ray.get_actor(name, namespace=namespace)
        info: Any = ray.get(self._scheduler.info.remote())
        self.info: EngineInfo = info

    def promises(self, prompt_tokens: list[int]) -> list[Promise | None]:
        """What is promised by default to prompts of these lengths; None where the workers were not measured."""
        import ray

        found: list[Promise | None] = ray.get(self._scheduler.promises.remote(prompt_tokens))
        return found

    def configure(self, policy: str, chunk_size: int) -> None:
        import ray

        ray.get(self._scheduler.configure.remote(policy, chunk_size))

    def tell_incidents(self, stopped: threading.Event, say: Say) -> None:
        """What dies and what becomes of it, a line each, until it is stopped."""
        import ray

        told: dict[str, int] = {}
        while not stopped.wait(INCIDENTS_EVERY_S):
            with suppress(Exception):  # it may be the scheduler that died; the next one tells of it
                life, lines = ray.get(self._scheduler.incidents.remote(), timeout=INCIDENTS_EVERY_S)
                for line in lines[told.get(life, 0) :]:
                    say(line)
                told[life] = len(lines)

    def close(self) -> None:
        """Take the engine down in order: its graphs, its ranks."""
        import ray

        ray.get(self._scheduler.close.remote(), timeout=3)

    def drain(self, seconds: float) -> None:
        """Take no more requests, and return when nothing runs or waits any more, or after that time; what is left then
        ends with an error that its client is told."""
        import ray

        if ray.get(self._scheduler.drain.remote(SHUTTING_DOWN, seconds), timeout=seconds + DRAIN_GRACE_S):
            time.sleep(LAST_WORDS_S)


def start(
    life: Lifetime,
    config: EngineConfig,
    address: Address,
    *,
    extra: dict[str, Any] | None = None,
    ray_address: str | None = None,
    say: Say = lambda line: None,
) -> Server:
    """Serve `config` until `life` ends, and return once it answers. `extra` are further arguments of the application.

    Raises CommandError, in one line, for whatever stands in the way; what can be checked is checked first.
    """
    address = open_address(address)
    check(config, ray_address)
    begin(life, address, ray_address, say)
    server = deploy(config, address, extra, say)
    if ray_address is None:
        life.on_close(server.close)
    return server


def open_address(address: Address) -> Address:
    """With a free port for port 0. Raises CommandError where it cannot be listened on."""
    return Address(address.host, check_port(address.host, address.port))


def check(config: EngineConfig, ray_address: str | None = None) -> None:
    """Raises CommandError for what can be known to fail before anything is started."""
    from workers.checkpoint import CheckpointError, resolve

    if ray_address is None:
        preflight.check_log(config)
    try:
        model_dir = resolve(config.model)
    except CheckpointError as error:
        raise CommandError(str(error)) from None
    if ray_address is None:
        preflight.check(config, model_dir)
    else:
        check_answers(ray_address)


def begin(life: Lifetime, address: Address, ray_address: str | None = None, say: Say = lambda line: None) -> None:
    """Ray and Serve, until `life` ends. Raises CommandError."""
    say(f"starting Ray{f' (cluster {ray_address})' if ray_address else ''}")
    _start_ray(life, address, ray_address)
    _start_serve(life, address, ray_address)


def deploy(
    config: EngineConfig, address: Address, extra: dict[str, Any] | None = None, say: Say = lambda line: None
) -> Server:
    """The application on the Serve that has begun, once it answers. Raises CommandError."""
    say(loading(config))
    _deploy({**config.model_dump(exclude_defaults=True), **(extra or {})})
    _wait_for_http(address)
    server = Server(address)
    if server.info.device == "cpu":
        background_steps_back()
    return server


def loading(config: EngineConfig) -> str:
    """What is done now, in words. Whether measurements are known already is not, before the workers say how large their
    KV pool is."""
    measured = config.profile_seconds > 0 or config.policy == "slo"
    also = ", and measuring its iterations if that has not been done on this machine" if measured else ""
    return f"loading {config.model}{also}"


def undeploy() -> None:
    """End the application, its engine with it; Serve goes on."""
    from ray import serve

    serve.delete(APPLICATION)


def _start_ray(life: Lifetime, listening: Address, address: str | None) -> None:
    import ray

    from cluster.local_ray import start_ray
    from deploy.balancer import find_haproxy, use_haproxy
    from deploy.front_door import IMPORT_PATH, VARIABLE

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if address is None:
            # A cluster of this command's own, whatever RAY_ADDRESS says and whoever else runs one on this machine.
            os.environ.pop("RAY_ADDRESS", None)
            os.environ.setdefault(VARIABLE, IMPORT_PATH)
            if haproxy := find_haproxy(listening.host, life.directory):
                life.on_close(use_haproxy(haproxy, life.directory, check_port(listening.host, 0)))
            start_ray(_temp_dir=str(life.directory))
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if address is None:
            raise CommandError(f"cannot start Ray: {reason}") from None
        hint = "" if "RAY_AUTH_MODE" in os.environ else "; if it asks for a token, set RAY_AUTH_MODE=token"
        raise CommandError(f"cannot reach the Ray cluster at {address}: {reason}{hint}") from None
    life.on_close(ray.shutdown)
    life.on_ended(_remove_semaphores)


def _start_serve(life: Lifetime, address: Address, ray_address: str | None) -> None:
    """On a cluster of others Serve may be theirs: then only our application goes when we go. On a Ray of our own
    everything goes with it, sooner than Serve would shut down in order."""
    from ray import serve
    from ray.exceptions import RayTaskError
    from ray.serve.config import HTTPOptions
    from ray.serve.schema import LoggingConfig

    from deploy.balancer import SWITCH

    logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.ERROR)
    if ray_address is not None:
        life.on_close((lambda: serve.delete(APPLICATION)) if _serve_runs() else serve.shutdown)
    try:
        serve.start(
            http_options=HTTPOptions(host=address.host, port=address.port),
            logging_config=LoggingConfig(log_level="ERROR"),
        )
    except RayTaskError as error:  # of who listens for it
        reason = str(error).strip().splitlines()[-1]
        hint = f" ({SWITCH}=0 does without HAProxy)" if os.environ.get(SWITCH) == "1" else ""
        raise CommandError(f"nobody listens for Ray Serve: {reason}{hint}") from None


def _remove_semaphores(pids: set[int]) -> None:
    """The channels of compiled graphs have semaphores of the raylet's id, which it does not take along."""
    for path in Path("/dev/shm").glob("sem.*"):
        if (match := _SEMAPHORE.match(path.name)) and int(match[1]) in pids:
            path.unlink(missing_ok=True)


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


def _wait_for_http(address: Address) -> None:
    """The application runs; Serve's proxy hears of it a moment later."""
    import httpx

    until = time.monotonic() + _HTTP_SECONDS
    while time.monotonic() < until:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{address.url}/ready", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise CommandError(f"the server was started, but does not answer at {address.url}")


def _cause(otherwise: str) -> str:
    """The application's own words, out of the nested traceback that Serve keeps of a replica that did not start."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    messages = [deployment.message for deployment in application.deployments.values()] if application else []
    for message in messages:
        if said := last_words(message):
            return said
    return otherwise


def last_words(message: str) -> str:
    """The error that a traceback ends in; empty where there is none. Those of ours without the name of their class."""
    said = _LAST_WORDS.findall(message)
    if not said:
        return ""
    kind, text = said[-1]
    return str(text) if kind in _PLAIN else f"{kind}: {text}"
