"""What is done with fields that no schema of ours has: some are harmless, some ask for what we cannot do.

Nothing that would change the answer is ever ignored: a field is dropped only where it does not ask for anything (null,
or the value that means "as usual"), or where OpenAI itself uses it for book-keeping alone.
"""

from __future__ import annotations

from typing import Any

from deploy.api.errors import bad_request, shorten

HARMLESS = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "request_id",
})  # fmt: skip

NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {
    # field: the values that ask for nothing
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "moderation": (),
    "suffix": ("",),
    "prompt_logprobs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "min_tokens": (0,),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "chat_template": (),
    "documents": ([],),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
}


def drop_what_asks_for_nothing(body: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The fields that a schema has to look at: `known` ones that are not null.

    Raises ApiError naming the first field that is not supported, or that nobody knows.
    """
    kept: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in HARMLESS:
            continue
        if name in known:
            kept[name] = value
        elif name in NOT_SUPPORTED:
            if not any(type(value) is type(usual) and value == usual for usual in NOT_SUPPORTED[name]):
                raise bad_request(f"{name} is not supported by this server", name, "unsupported_parameter")
        else:
            shown = shorten(name)
            raise bad_request(f"Unrecognized request argument supplied: {shown}", shown, "unknown_parameter")
    return kept
