"""The API's routes over an engine. It knows no Ray: tests and scripts run it over an engine in their own process."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from cluster.engine import Engine, EngineUnavailable
from deploy.api.answer import Answer
from deploy.api.authentication import Authentication, key_of
from deploy.api.body import read_body
from deploy.api.boundary import Boundary
from deploy.api.choice import Choice
from deploy.api.description import describe_bodies
from deploy.api.echo import Echo
from deploy.api.errors import ApiError, install_error_handlers, shorten
from deploy.api.formats import ChatFormat, CompletionFormat, Format
from deploy.api.job import Job, check_parameters, make_job
from deploy.api.prompts import Encoder, Limits, RawPrompt, parse_messages, parse_prompts
from deploy.api.schemas import ChatRequest, CompletionRequest, Sampling, parse
from deploy.api.settings import ApiSettings
from deploy.api.slo import HEADER as SLO_HEADER
from deploy.api.stops import StopStrings
from deploy.api.structured import ResponseFormats
from deploy.arrival import seconds_on_its_way
from workers.tokenizer import Tokenizer

MOST_ITERATIONS = 10_000
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_api(
    engine: Engine, tokenizer: Tokenizer, settings: ApiSettings | None = None, *, answer_ids: bool = True
) -> FastAPI:
    """An ASGI application. It may be served by one event loop only: the one that the engine was started in.

    `answer_ids`: whether answers carry X-Request-Id; not where a proxy before it adds that.
    """
    settings = settings or ApiSettings()
    threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="tokenizer")
    api = Api(engine, tokenizer, settings, threads)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        yield
        threads.shutdown(wait=False, cancel_futures=True)
        api.close()

    app = FastAPI(title="Stallfree", lifespan=lifespan, redirect_slashes=False)
    if settings.api_keys:
        app.add_middleware(Authentication, keys=settings.api_keys)
    app.add_middleware(Boundary, answer_ids=answer_ids)
    install_error_handlers(app, settings.retry_after_s)
    bodies: dict[str, tuple[Callable[..., Any], type[Sampling]]] = {
        "/v1/completions": (api.completions, CompletionRequest),
        "/v1/chat/completions": (api.chat_completions, ChatRequest),
    }
    for path, (endpoint, _) in bodies.items():
        app.add_api_route(path, endpoint, methods=["POST"], response_model=None)
    describe_bodies(app, {path: schema for path, (_, schema) in bodies.items()})
    look_ups: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("/v1/models", api.models),
        ("/v1/models/{model:path}", api.model),
        ("/v1/stallfree/iterations", api.iterations),
        ("/v1/stallfree/promises", api.promises),
        ("/health", api.health),
        ("/ready", api.ready),
        ("/metrics", api.metrics),
    )
    for path, endpoint in look_ups:
        for method in ("GET", "HEAD"):
            app.add_api_route(path, endpoint, methods=[method], include_in_schema=method == "GET")
    return app


class Api:
    """The endpoints. Each raises ApiError, RequestRefused or EngineUnavailable, which the app turns into answers."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, settings: ApiSettings, threads: ThreadPoolExecutor
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._settings = settings
        self._limits = Limits(engine.info.max_model_len, engine.info.vocab_size)
        self._encoder = Encoder(tokenizer, threads, self._limits)
        self._formats = ResponseFormats(tokenizer, engine.info.vocab_size, settings.max_schema_characters)
        self._started = int(time.time())

    def close(self) -> None:
        self._formats.close()

    async def completions(self, request: Request) -> Response:
        """Continue one prompt or several."""
        arrived = time.monotonic() - seconds_on_its_way(request.headers)

        def understand(raw: dict[str, Any]) -> tuple[CompletionRequest, list[RawPrompt]]:
            body = parse(CompletionRequest, raw)
            self._check(body)
            return body, parse_prompts(body.prompt, self._limits, self._settings)

        body, raw_prompts = await read_body(request, self._settings.max_body_bytes, understand)
        prompts = await self._encoder.prompts(raw_prompts, body.add_special_tokens)
        schema = await self._formats.schema_of(body)
        job = self._job(body, prompts, arrived, request, schema)
        scored = body.prompt_logprobs_wanted is not None
        echoes = await self._encoder.echoes(prompts, scored) if body.echo else []
        common = (job, self._engine.info.served_model_name, self._tokenizer)
        form = CompletionFormat(
            *common, body.return_token_ids, body.logprobs is not None, echo=[echo.text for echo in echoes]
        )
        return self._answer(form, body, [echo for echo in echoes for _ in range(body.n)])

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        arrived = time.monotonic() - seconds_on_its_way(request.headers)

        def understand(raw: dict[str, Any]) -> tuple[ChatRequest, list[dict[str, str]]]:
            body = parse(ChatRequest, raw)
            self._check(body)
            return body, parse_messages(body, self._settings)

        body, messages = await read_body(request, self._settings.max_body_bytes, understand)
        schema = await self._formats.schema_of(body)
        job = self._job(body, [await self._encoder.chat(body, messages)], arrived, request, schema)
        common = (job, self._engine.info.served_model_name, self._tokenizer)
        return self._answer(ChatFormat(*common, body.return_token_ids, body.logprobs), body, [])

    async def models(self) -> dict[str, Any]:
        """The models served here: one."""
        return {"object": "list", "data": [self._describe()]}

    async def model(self, model: str) -> dict[str, Any]:
        self._check_model(model)
        return self._describe()

    async def iterations(
        self,
        after: Annotated[
            int, Query(ge=-1, le=2**53, description="only iterations after this `seq`; -1: the latest")
        ] = -1,
        limit: Annotated[int, Query(ge=1, le=MOST_ITERATIONS)] = 100,
    ) -> dict[str, Any]:
        """The decision log: what each iteration carried, what bound its budget, and how long it took."""
        return {"object": "list", "data": await self._engine.iterations(after, limit)}

    async def promises(self) -> dict[str, Any]:
        """What this server promises where a request asks for nothing, and what it could."""
        outlook = self._engine.info.outlook
        if outlook is None:
            raise ApiError(404, "this server was started without measuring its workers", code="not_found")
        return {"object": "promises", "policy": self._engine.info.policy, **outlook.as_json()}

    async def health(self) -> dict[str, Any]:
        """200 after a real forward on every worker group within the deadline, 503 otherwise."""
        await self._engine.health(self._settings.health_timeout_s)
        return {"status": "ok", "model": self._engine.info.served_model_name}

    async def ready(self) -> dict[str, Any]:
        """200 where a new request would be served, 503 with the reason where it would be refused or have to wait for
        workers. Without a forward, so at once."""
        reason = (await self._engine.stats()).get("not_ready")
        if reason:
            raise EngineUnavailable(reason)
        return {"status": "ready", "model": self._engine.info.served_model_name}

    async def metrics(self) -> Response:
        """The engine's figures in Prometheus' text format."""
        return Response(await self._engine.metrics(), media_type=METRICS_TYPE)

    def _check(self, body: Sampling) -> None:
        self._check_model(body.model)
        check_parameters(body, self._limits.vocab_size, self._settings)

    def _check_model(self, name: str) -> None:
        served = self._engine.info.served_model_name
        if name != served:
            message = f"The model {shorten(repr(name))} does not exist; this server has {served!r}."
            raise ApiError(404, message, code="model_not_found", param="model")

    def _describe(self) -> dict[str, Any]:
        info = self._engine.info
        return {
            "id": info.served_model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "stallfree",
            "max_model_len": info.max_model_len,
        }

    def _job(self, body: Sampling, prompts: list[Any], arrived: float, request: Request, schema: str) -> Job:
        eos, slo = self._tokenizer.eos_token_ids, request.headers.get(SLO_HEADER)
        return make_job(body, prompts, self._engine.info, eos, self._settings, arrived, slo, key_of(request), schema)

    def _answer(self, form: Format, body: Sampling, echoes: list[Echo]) -> Answer:
        """`echoes`: what comes before each choice's own text, or nothing."""
        job = form.job
        before = echoes or [Echo("")] * len(job.requests)
        choices = [
            Choice(
                self._tokenizer.detokenizer(request.prompt, body.skip_special_tokens),
                StopStrings(job.stop, body.include_stop_str_in_output),
                job.user_stop_token_ids,
                len(echo.text),
                echo.scored,
            )
            for request, echo in zip(job.requests, before, strict=True)
        ]
        return Answer(self._engine, form, choices, body, self._settings)
