"""An answer's event stream: events from bytes, and the time of each token from events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deploy.bench.record import CountedBy

DONE = "[DONE]"


class Lines:
    """Splits what comes over the wire into the data of events; a part of a line waits for the rest of it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, received: bytes) -> Iterator[dict[str, Any] | str]:
        """Events as objects, and DONE. Raises ValueError for data that is neither."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield _event(line[5:].strip())


def _event(data: bytes) -> dict[str, Any] | str:
    if data == b"[DONE]":
        return DONE
    event = json.loads(data)
    if not isinstance(event, dict):
        raise ValueError("an event is no JSON object")
    return event


@dataclass(slots=True)
class TokenClock:
    """The time of each token of one stream. Exact where the server sends token ids or a running count of them, however
    many come in one chunk; otherwise a chunk with text is a token, and the total is put right at the end."""

    times: list[float] = field(default_factory=list)
    counted_by: CountedBy | None = None
    prompt_tokens: int | None = None
    finished: bool = False
    _ids: int = 0
    _total: int | None = None

    def note(self, event: dict[str, Any], now: float) -> None:
        """Take in one event that came `now`. What is not of the expected shape is passed over."""
        choice = _first(event.get("choices"))
        usage = event.get("usage")
        total = None
        if isinstance(usage, dict):
            total = _count(usage.get("completion_tokens"))
            self.prompt_tokens = _count(usage.get("prompt_tokens")) or self.prompt_tokens
        if choice is not None and choice.get("finish_reason"):
            self.finished = True
        ids = choice.get("token_ids") if choice is not None else None
        if isinstance(ids, list):
            self._ids += len(ids)
            self._reach(self._ids, now, CountedBy.TOKEN_IDS)
        elif total is not None and (self._exact or (choice is not None and self.counted_by is None)):
            self._reach(total, now, self.counted_by or CountedBy.USAGE)
        elif choice is not None and _has_text(choice) and not self._exact:
            self.times.append(now)
            self.counted_by = CountedBy.CHUNKS
        if total is not None:
            self._total = total

    def close(self) -> None:
        """The stream has ended. Where the server's total differs from the chunks that were taken for tokens, the total
        is right: its tokens are spread over the chunks' times, the first and the last of which stay."""
        if self.counted_by is CountedBy.CHUNKS and self._total and self._total != len(self.times):
            self.times = spread(self.times, self._total)
            self.counted_by = CountedBy.FINAL_USAGE

    @property
    def _exact(self) -> bool:
        return self.counted_by in (CountedBy.TOKEN_IDS, CountedBy.USAGE)

    def _reach(self, total: int, now: float, by: CountedBy) -> None:
        if total > len(self.times):
            self.times.extend([now] * (total - len(self.times)))
        if self.times:
            self.counted_by = by


def spread(times: list[float], total: int) -> list[float]:
    """`total` times out of those given, evenly, with the first and the last among them."""
    last = len(times) - 1
    return [times[round(index * last / (total - 1))] for index in range(total)] if total > 1 else times[:1]


def _first(choices: Any) -> dict[str, Any] | None:
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def _has_text(choice: dict[str, Any]) -> bool:
    """Of a completion or a chat; a model that thinks aloud and one that calls a tool generate tokens too."""
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    fields = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")
    return isinstance(delta, dict) and any(delta.get(name) for name in fields)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 24 else None
