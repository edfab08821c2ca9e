"""The decision log: what each iteration carried and why, in a bounded ring, and line by line in a file where one is
asked for. Request ids and numbers only; nothing of what is written or answered."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from cluster.loop import PROBE_PREFIX, IterationRecord
from scheduler.request import Delta

logger = logging.getLogger(__name__)

Entry = dict[str, Any]
FLUSH_S = 1.0
MOST_NAMES = 1 << 20
"""Request ids that the ring holds in all: with thousands of streams an iteration, it keeps fewer iterations."""


def open_log(path: str) -> TextIO:
    """Appended to. Raises OSError."""
    return Path(path).open("a", encoding="utf-8")


class IterationLog:
    """`kept` iterations, the oldest forgotten first; `seq` numbers all of them over all groups, from 1 on."""

    def __init__(self, kept: int, path: str | None = None) -> None:
        self._kept = kept
        self._ring: deque[Entry] = deque()
        self._names = 0
        self._seq = 0
        self._ended: list[str] = []
        self._transfers: list[Entry] = []
        self._epoch_s = time.time() - time.monotonic()
        self._file: TextIO | None = open_log(path) if path else None
        self._flushed = 0.0

    def append(self, group: int, record: IterationRecord, transfers: Iterable[Entry] = ()) -> None:
        """Take an iteration in, with what came from group to group since the last one (`sends` of which become Unix
        times); those of health checks alone are left out."""
        if self._kept == 0 and self._file is None:
            return
        self._transfers += [
            {**moved, "sends": [[self._unix_ms(when) for when in span] for span in moved["sends"]]}
            for moved in transfers
        ]
        entry = self._entry(group, record)
        if not (entry["chunks"] or entry["tokens"] or entry["finished"]):
            return
        self._seq += 1
        entry["seq"] = self._seq
        if self._transfers:
            entry["transfers"] = self._transfers
        self._ended, self._transfers = [], []
        self._keep(entry)
        if self._file is not None:
            self._write(self._file, entry)

    def ended(self, deltas: Iterable[Delta]) -> None:
        """Requests that ended outside of any iteration; the next one's entry names them."""
        if self._kept or self._file is not None:
            self._ended += _ended(deltas)

    def entries(self, after: int, limit: int) -> list[Entry]:
        """At most `limit` iterations that came after number `after`, oldest first; the latest `limit` where `after` is
        negative."""
        newer = self._seq - after if after >= 0 else limit
        wanted = min(len(self._ring), max(0, newer))
        first = len(self._ring) - wanted
        return list(islice(self._ring, first, first + limit))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _entry(self, group: int, record: IterationRecord) -> Entry:
        decision = record.under_way.decision
        return {
            "seq": 0,
            "group": group,
            "iteration": record.plan.iteration,
            "start_ms": self._unix_ms(record.started),
            "actual_ms": round(record.actual_s * 1e3, 3),
            "forward_ms": round(sum(record.result.forward_s) * 1e3, 3),
            "predicted_ms": None if record.predicted_s is None else round(record.predicted_s * 1e3, 3),
            "budget": decision.token_budget,
            "bound": decision.bound,
            "allowed_ms": None if decision.allowed_s is None else round(decision.allowed_s * 1e3, 3),
            "tightest": decision.tightest,
            "prefill_tokens": record.prefill_tokens,
            "decodes": record.decodes,
            "chunks": [
                {
                    "request": chunk.request_id,
                    "offset": chunk.offset,
                    "count": chunk.count,
                    "prompt_tokens": chunk.prompt_tokens,
                    "waited_ms": round((record.started - chunk.arrival) * 1e3, 3),
                    "ttft_ms": round(chunk.promise.ttft_s * 1e3, 3),
                    "tpot_ms": round(chunk.promise.tpot_s * 1e3, 3),
                    "tbt_ms": None if chunk.promise.tbt_s is None else round(chunk.promise.tbt_s * 1e3, 3),
                }
                for chunk in record.under_way.chunks
                if not chunk.request_id.startswith(PROBE_PREFIX)
            ],
            "tokens": [t.request_id for t in record.timings if not t.request_id.startswith(PROBE_PREFIX)],
            "finished": [*self._ended, *_ended(record.deltas)],
            "preempted": list(record.under_way.preempted),
        }

    def _unix_ms(self, when: float) -> float:
        return round((self._epoch_s + when) * 1e3, 3)

    def _keep(self, entry: Entry) -> None:
        self._ring.append(entry)
        self._names += len(entry["tokens"])
        while len(self._ring) > self._kept or (self._names > MOST_NAMES and len(self._ring) > 1):
            self._names -= len(self._ring.popleft()["tokens"])

    def _write(self, file: TextIO, entry: Entry) -> None:
        """A full disk ends the file, not the serving."""
        try:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")
            if (now := time.monotonic()) - self._flushed >= FLUSH_S:
                file.flush()
                self._flushed = now
        except OSError as error:
            logger.error("the iteration log cannot be written any more: %s", error)
            self._file = None


def _ended(deltas: Iterable[Delta]) -> list[str]:
    return [delta.request_id for delta in deltas if delta.finish and not delta.request_id.startswith(PROBE_PREFIX)]
