"""Which server is driven, and how it is spoken to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import httpx

from cluster.workloads.prompts import VOCABULARY

Endpoint = Literal["completions", "chat"]

CONNECT_S = 30.0
"""A host that does not answer at all is not waited for as long as a server that thinks."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server by its URL, with or without /v1. Without a `model` its first one is taken. `extra` goes into the body of
    every request, the warm-up's and the detection's too. `timeout_s` is how long a request may go without a byte.
    Random prompts draw their token ids from `vocabulary`. Raises ValueError for what is no URL."""

    url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    vocabulary: range = VOCABULARY

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            wrong = parts.scheme not in ("http", "https") or not parts.hostname or (parts.port or 1) < 1
        except ValueError:
            wrong = True
        if wrong:
            raise ValueError(f"not a URL of a server: {self.url!r}; give one such as http://127.0.0.1:8000")
        if self.endpoint not in ("completions", "chat"):
            raise ValueError(f"endpoint is completions or chat, not {self.endpoint!r}")

    @property
    def base(self) -> str:
        """The URL without /v1."""
        return self.url.rstrip("/").removesuffix("/v1")

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        return headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})

    def client(self) -> httpx.AsyncClient:
        """For the questions before the load. Without the environment's proxies, as the load itself."""
        timeout = httpx.Timeout(self.timeout_s, connect=self._connect_s)
        return httpx.AsyncClient(
            base_url=self.base, headers=self.headers, timeout=timeout, trust_env=False, follow_redirects=True
        )

    def session(self) -> aiohttp.ClientSession:
        """For the load: what reads streams with the least of the processor, which may be the server's too. Without a
        bound on connections, which would hold requests back."""
        trusted = httpx.create_ssl_context(trust_env=False) if self.base.startswith("https:") else True
        return aiohttp.ClientSession(
            headers=self.headers,
            connector=aiohttp.TCPConnector(limit=0, ssl=trusted),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s, sock_read=self.timeout_s),
        )

    @property
    def _connect_s(self) -> float:
        return min(CONNECT_S, self.timeout_s)
