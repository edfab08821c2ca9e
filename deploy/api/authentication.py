"""Who may ask: `Authorization: Bearer KEY`, looked at before anything else of a request is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from deploy.api.body import discard_rest
from deploy.api.errors import ApiError
from deploy.api.keys import Key, known

OPEN_PATHS = frozenset({"/health", "/ready"})
"""What an orchestrator asks without a key. Neither says anything of requests."""

_KEY = "stallfree.key"


class Authentication:
    """ASGI middleware that lets requests with one of `keys` through, and notes whose they are.

    Raises ApiError (401), which a layer outside it turns into an answer.
    """

    def __init__(self, app: ASGIApp, keys: tuple[Key, ...]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope):
            request = Request(scope, receive)
            try:
                scope[_KEY] = self._key(request)
            except ApiError:
                await discard_rest(request)
                raise
        await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return (
            scope["method"] in ("GET", "HEAD") and scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS
        )

    def _key(self, request: Request) -> Key:
        given = [value for name, value in request.headers.raw if name.lower() == b"authorization"]
        if not given:
            raise _unauthorized(
                "No API key was given. Send it in a header: Authorization: Bearer KEY", "missing_api_key"
            )
        kind, _, secret = given[0].partition(b" ")
        if len(given) > 1 or kind.lower() != b"bearer" or not secret.strip():
            raise _unauthorized(
                "The Authorization header must be one: Bearer KEY", "invalid_api_key", "invalid_request"
            )
        key = known(secret.strip(), self._keys)
        if key is None:
            raise _unauthorized("The API key is not known to this server", "invalid_api_key", "invalid_token")
        return key


def key_of(request: Request) -> Key | None:
    """What the request came with; None on a server without keys."""
    found: Key | None = request.scope.get(_KEY)
    return found


def _unauthorized(message: str, code: str, challenge: str = "") -> ApiError:
    """With the challenge of RFC 6750, section 3."""
    asked = 'Bearer realm="stallfree"' + (f', error="{challenge}"' if challenge else "")
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": asked})
