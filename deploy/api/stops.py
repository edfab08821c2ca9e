"""Stop strings in a text that comes in pieces: nothing of one is ever given out, and nothing else is kept for long."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feeds characters to one automaton (Knuth, Morris, Pratt) per stop string.

    Its state is the length of the longest suffix that begins the stop string: what has to be held back is the largest
    of them, and the stop that is complete first ends the text, however the text is cut into pieces. Where two are
    complete at the same character, the longer one counts.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be given out, the stop string that ended it or None). Nothing may be pushed after an end."""
        if not self._stops:
            return text, None
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                self._states[index] = state = self._advance(index, character)
                if state == len(stop):
                    self._held = ""
                    return buffer[: position if self._include else position - state], stop
        keep = max(self._states)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """At the end of the text: what only looked like the beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, index: int, character: str) -> int:
        stop, fallbacks, state = self._stops[index], self._fallbacks[index], self._states[index]
        while state and stop[state] != character:
            state = fallbacks[state - 1]
        return state + 1 if stop[state] == character else 0


def _fallbacks(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    lengths = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = lengths[length - 1]
        if stop[index] == stop[length]:
            length += 1
        lengths[index] = length
    return lengths
