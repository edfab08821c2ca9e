"""Command line options made of the configuration's fields: one place says what there is and what is allowed.

An option's text reaches the configuration unchanged, so the command line, `serve run key=value` and a script are
checked by the same rules. A field that somebody adds to the configuration is an option without more ado.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from rich.markup import escape

from cluster.config import EngineConfig
from deploy.errors import CommandError

Model = TypeVar("Model", bound=BaseModel)

_HELP = {
    "model": "smollm2 (embedded), a local directory, a .gguf file, or a hub id.",
    "served_model_name": "Name that clients use.",
    "tp": "Tensor-parallel ranks of a worker group.",
    "groups": "Worker groups, each with the whole model (colocated).",
    "mode": "Prompts and streams on the same groups, or on groups of their own.",
    "prefill_groups": "Groups that compute prompts (separated).",
    "decode_groups": "Groups that generate (separated).",
    "prefill_tp": "Tensor-parallel ranks of a prefill group.",
    "decode_tp": "Tensor-parallel ranks of a decode group.",
    "prefill_policy": "What an iteration of a prefill group takes of long prompts.",
    "policy": "What an iteration takes of long prompts.",
    "chunk_size": "Prompt tokens an iteration takes (chunked, alternate).",
    "max_batched_tokens": "Most tokens of one iteration, whatever the policy.",
    "max_running": "Most sequences that run at once in a group.",
    "max_model_len": "Most tokens of a sequence.",
    "block_size": "Tokens of a KV block.",
    "kv_memory": "KV memory of a group, e.g. 2GiB.",
    "num_blocks": "KV blocks of a group, instead of --kv-memory.",
    "preempt": "What becomes of KV that gives way: computed again, or copied to host memory and back.",
    "swap_memory": "Host memory of a group for --preempt swap.",
    "prefix_caching": "Reuse the KV of prompts that begin alike.",
    "gpu_memory_utilization": "Share of free GPU memory for KV.",
    "max_queued_requests": "Requests that may wait before new ones are refused.",
    "max_queued_tokens": "Tokens of prompts that may wait before new requests are refused.",
    "device": "Where the model runs.",
    "dtype": "Of weights and computation.",
    "kv_dtype": "In what KV is kept: int8 takes about a quarter of float32.",
    "attention": "Attention backend.",
    "threads": "CPU threads of a rank.",
    "overlap": "Iterations under way at once.",
    "transport": "How plans travel to the workers.",
    "ttft_ms": "Promised time to first token (slo).",
    "tpot_ms": "Promised time per output token (slo).",
    "tbt_ms": "Bound on each single gap (slo).",
    "on_infeasible": "What becomes of a request whose promise is predicted to be missed (slo).",
    "prefill_order": "Of the prompts that can be in time: the first to be due, or least time to spare, first (slo).",
    "profile_seconds": "How long iterations are measured at the first start; 0: not at all.",
    "hang_seconds": "How much longer than predicted an iteration may take before its workers are replaced.",
    "iterations_kept": "Iterations that the decision log remembers.",
    "iteration_log": "A file that gets the decision log too, one JSON line an iteration.",
    "slo_classes": "Classes of service: name=factor or name=ttft:tpot[:tbt], with commas.",
}

_DEFAULT = {
    "served_model_name": "the model's",
    "prefill_tp": "that of --tp",
    "decode_tp": "that of --tp",
    "prefill_policy": "that of --policy",
    "max_model_len": "the model's",
    "block_size": "16 on CPU, 256 on CUDA",
    "kv_memory": "from what is free",
    "swap_memory": "as the KV pool, at most a quarter of what is free",
    "prefix_caching": "true",
    "dtype": "auto, float32 on CPU, else the checkpoint's",
    "kv_dtype": "auto, as --dtype",
    "attention": "auto, by device",
    "threads": "this machine's, divided",
    "ttft_ms": "measured",
    "tpot_ms": "measured",
    "tbt_ms": "measured",
    "slo_classes": "interactive=1,batch=10",
}
"""Defaults that follow from the machine or the model, in words."""


def with_engine_options(function: Callable[..., Any], leave_out: frozenset[str] = frozenset()) -> Callable[..., Any]:
    """`function` as a typer command that also takes an option for every field of EngineConfig, `--x true|false` and
    `--no-x` for one that is true or false.

    `function` receives those that were given in its keyword argument `engine`, as text by field name.
    """
    fields = {name: field for name, field in EngineConfig.model_fields.items() if name not in leave_out}
    switches = [name for name, field in fields.items() if field.annotation is bool]

    def command(**given: Any) -> Any:
        engine = {name: given.pop(name) for name in fields}
        for name in switches:
            if given.pop(f"no_{name}"):
                engine[name] = _switched_off(name, engine[name])
        return function(engine={name: text for name, text in engine.items() if text is not None}, **given)

    own = [parameter for parameter in _parameters(function) if parameter.name != "engine"]
    added = [_parameter(name, field) for name, field in fields.items()]
    added += [_off_switch(name) for name in switches]
    command.__doc__ = function.__doc__
    command.__name__ = function.__name__
    command.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
    return command


def engine_config(given: dict[str, Any]) -> EngineConfig:
    """Raises CommandError that names the option where a value is not allowed."""
    return checked(EngineConfig, given)


def checked(model: type[Model], given: dict[str, Any]) -> Model:
    try:
        return model(**given)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # of several options together
            raise CommandError(message, 2) from None
        where = _flag(str(first["loc"][0]))
        raise CommandError(f"{where}: {message[:1].lower()}{message[1:]} (got {first['input']!r})", 2) from None


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function, eval_str=True).parameters.values())


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    default = _DEFAULT.get(name, None if field.is_required() else field.get_default(call_default_factory=False))
    text = escape(_HELP.get(name, "")) + ("" if default is None else f" {escape(f'[default: {default}]')}")
    option = typer.Option(
        _flag(name),
        metavar=_metavar(name, field),
        help=text,
        show_default=False,
        rich_help_panel="Engine",
    )
    annotation = Annotated[str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _off_switch(name: str) -> inspect.Parameter:
    option = typer.Option(
        _flag(f"no_{name}"), help=f"The same as {_flag(name)} false.", show_default=False, rich_help_panel="Engine"
    )
    return inspect.Parameter(
        f"no_{name}", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def _switched_off(name: str, also_given: str | None) -> str:
    if also_given is not None:
        raise CommandError(f"{_flag(name)} and {_flag(f'no_{name}')} are both given; choose one", 2)
    return "false"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(name: str, field: FieldInfo) -> str:
    if name.endswith("_memory"):
        return "SIZE"
    if field.annotation is bool:
        return "true|false"
    kinds = [field.annotation, *get_args(field.annotation)]
    for kind in kinds:
        if get_origin(kind) is Literal:
            return "|".join(str(value) for value in get_args(kind))
    if int in kinds or any(int in get_args(kind) for kind in kinds):
        return "N"
    return "SHARE" if float in kinds else "NAME"
