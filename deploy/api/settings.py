"""What the API allows. Everything whose size a client chooses has a bound here."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from cluster.config import parse_bytes
from deploy.api.keys import Key, parse_keys


class ApiSettings(BaseModel):
    """Limits of one API server. Times in seconds; `max_choices` counts prompts x n of one request. With `api_keys`, or
    lines `name:sha256`, every request but for `/health` and `/ready` has to come with one.
    A client that takes in nothing for `send_timeout_s`, while more is to be sent than fits between, has its request
    ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_keys: Annotated[tuple[Key, ...], BeforeValidator(parse_keys)] = Field(default=(), repr=False)

    max_body_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)] = 8 * 2**20
    max_prompts: int = Field(default=256, ge=1)
    max_choices: int = Field(default=1024, ge=1)
    max_messages: int = Field(default=4096, ge=1)
    max_stop_strings: int = Field(default=16, ge=1)
    max_stop_characters: int = Field(default=1024, ge=1)
    max_stop_token_ids: int = Field(default=128, ge=1)
    max_logit_bias: int = Field(default=300, ge=1)
    max_schema_characters: int = Field(default=64 * 2**10, ge=1)
    health_timeout_s: float = Field(default=30.0, gt=0)
    request_timeout_s: float | None = Field(default=None, gt=0)
    send_timeout_s: float = Field(default=60.0, gt=0)
    retry_after_s: int = Field(default=1, ge=1)
    tokenizer_threads: int = Field(default=2, ge=1, le=64)
