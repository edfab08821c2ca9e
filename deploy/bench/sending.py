"""One request from its sending to its end. Whatever goes wrong is a kind of error in its record, never an exception."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cluster.workloads.planned import PlannedRequest
from deploy.bench.dialect import error_of, parts_of
from deploy.bench.events import DONE, Lines, TokenClock
from deploy.bench.record import Outcome, RequestRecord


class _Failure(Exception):
    """`kind` is what errors are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Sending:
    """A request on its way. `body` is encoded beforehand, so that nothing heavy happens when it is due. The reader
    leaves once `enough` tokens have come; `led` is set when there are `lead` of them, or when it has ended."""

    plan: PlannedRequest
    body: bytes
    origin: float
    enough: int | None = None
    lead: int | None = None
    led: asyncio.Event = field(default_factory=asyncio.Event)
    clock: TokenClock = field(default_factory=TokenClock)
    sent: float | None = None
    record: RequestRecord | None = None

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        """Sends it and reads to the end; `record` is there afterwards, also if this is cancelled."""
        self.sent = time.perf_counter()
        outcome, kind, message, left = Outcome.FINISHED, None, "", False
        try:
            left = await self._read(session, url)
        except asyncio.CancelledError:
            outcome = Outcome.UNFINISHED
            raise
        except _Failure as error:
            outcome, kind, message = Outcome.FAILED, error.kind, str(error)
        except Exception as error:  # of a library: one request's misfortune must not end a run of thousands
            outcome, kind, message = Outcome.FAILED, f"client {type(error).__name__}", str(error)[:200]
        finally:
            self.clock.close()
            self.record = self._as_record(outcome, kind, message, left)
            self.led.set()

    async def _read(self, session: aiohttp.ClientSession, url: str) -> bool:
        """Whether the reader left before the end. Raises _Failure."""
        answering = False
        try:
            async with session.post(url, data=self.body) as response:
                if response.status != 200:
                    raise _Failure(*error_of(response.status, await response.read()))
                answering = True
                return await self._follow(response)
        except TimeoutError as error:
            raise _Failure("timeout", type(error).__name__) from None
        except aiohttp.ClientError as error:
            words = str(error) or type(error).__name__
            raise _Failure("cut short" if answering else "connection", words) from None

    async def _follow(self, response: aiohttp.ClientResponse) -> bool:
        lines, done = Lines(), False
        async for received in response.content.iter_any():
            now = time.perf_counter()
            try:
                for event in lines.feed(received):
                    done = done or event == DONE
                    self._take(event, now)
            except (ValueError, RecursionError) as error:
                raise _Failure("malformed event", str(error)) from None
            if self.enough is not None and len(self.clock.times) >= self.enough:
                return True
        if not (done or self.clock.finished):
            raise _Failure("cut short", f"the stream ended after {len(self.clock.times)} tokens")
        if not self.clock.times:
            raise _Failure("no tokens", "the stream ended well, without a token")
        return False

    def _take(self, event: dict[str, Any] | str, now: float) -> None:
        if isinstance(event, str):
            return
        if event.get("error"):
            code, message = parts_of(event["error"])
            raise _Failure(f"stream error {code}" if code else "stream error", message)
        self.clock.note(event, now)
        if self.lead is not None and len(self.clock.times) >= self.lead:
            self.led.set()

    def _as_record(self, outcome: Outcome, kind: str | None, message: str, left: bool) -> RequestRecord:
        assert self.sent is not None
        return RequestRecord(
            kind=self.plan.kind,
            due_s=self.plan.at_s,
            sent_s=self.sent - self.origin,
            tokens=tuple(when - self.origin for when in self.clock.times),
            ended_s=time.perf_counter() - self.origin,
            prompt_tokens=self.clock.prompt_tokens or self.plan.prompt_tokens,
            asked_tokens=self.plan.output_tokens,
            outcome=outcome,
            counted_by=self.clock.counted_by,
            error=kind,
            message=message,
            left=left,
        )
