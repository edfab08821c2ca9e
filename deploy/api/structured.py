"""`response_format`: what the answer has to be, checked and compiled before the engine hears of the request."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jsonschema import FormatChecker
from jsonschema.exceptions import SchemaError
from jsonschema.validators import Draft202012Validator, validator_for

from deploy.api.errors import ApiError, bad_request, shorten
from deploy.api.json_schema import plain
from deploy.api.schemas import Sampling
from workers.constraints import GrammarError
from workers.grammar import ANY_OBJECT, Grammars, canonical
from workers.tokenizer import Tokenizer

PARAM = "response_format"
SCHEMA = "response_format.json_schema.schema"
_FORMATS = FormatChecker(set(FormatChecker.checkers) - {"regex"})
"""Of a schema's own text. Patterns are ECMA-262's, not Python's: whether they are any shows when they are compiled."""
COMPILE_S = 10.0
"""Steps are bounded (`workers.grammar`); this is for a machine that does not come to them."""


class ResponseFormats:
    """Compiles on a thread of its own, so that neither the event loop nor the tokenizing of others waits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, max_characters: int) -> None:
        self._tokenizer, self._vocab_size, self._max_characters = tokenizer, vocab_size, max_characters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._grammars: Grammars | None = None

    async def schema_of(self, body: Sampling) -> str:
        """The JSON schema that the answer has to keep to, "" for none. Raises ApiError for one that is none, that says
        more than is understood, or that is too large."""
        asked = body.response_format
        if asked is None or asked.type == "text":
            return ""
        if body.ignore_eos:
            raise bad_request("ignore_eos cannot be used with response_format: its end is the answer's", "ignore_eos")
        given = None if asked.json_schema is None else asked.json_schema.schema_
        try:
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._checked, given)
            return await asyncio.wait_for(work, COMPILE_S)
        except TimeoutError:
            raise bad_request(f"{SCHEMA} takes too long to compile", SCHEMA, "invalid_json_schema") from None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _checked(self, given: dict[str, Any] | None) -> str:
        schema = ANY_OBJECT if given is None else self._text(given)
        try:
            self._of_tokenizer().check(schema)
        except GrammarError as error:
            if given is None:
                raise bad_request(f"{PARAM} is not supported for this model: {error}", PARAM) from None
            raise _no_schema(str(error)) from None
        return schema

    def _text(self, given: dict[str, Any]) -> str:
        try:
            text = canonical(plain(given))
            if len(text) > self._max_characters:
                raise _no_schema(f"it has {len(text)} characters, but the limit is {self._max_characters}")
            validator_for(given, default=Draft202012Validator).check_schema(given, format_checker=_FORMATS)
        except SchemaError as error:
            where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
            raise _no_schema(f"{shorten(where.lstrip('.'), 100)}: {shorten(error.message, 200)}".lstrip(": ")) from None
        except RecursionError:
            raise _no_schema("it is nested too deeply") from None
        except (ValueError, TypeError) as error:
            raise _no_schema(str(error) or type(error).__name__) from None
        return text

    def _of_tokenizer(self) -> Grammars:
        """Made once it is needed: it takes some tenths of a second. Raises GrammarError."""
        if self._grammars is None:
            content = self._tokenizer.as_json
            if content is None:
                raise GrammarError("its tokenizer is of a kind that is not understood")
            self._grammars = Grammars(content, self._vocab_size)
        return self._grammars


def _no_schema(why: str) -> ApiError:
    return bad_request(f"Invalid schema for response_format: {shorten(why, 400)}", SCHEMA, "invalid_json_schema")
