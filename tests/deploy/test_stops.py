"""Stop strings against their plain meaning: text up to the stop that is complete first, character by character."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.api.stops import StopStrings


def plainly(text: str, stops: list[str]) -> tuple[str, str | None]:
    """What is given out of a whole text, and the stop that ended it."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


few_letters = st.text(alphabet="ab·", max_size=12)


@given(pieces=st.lists(few_letters, max_size=12), stops=st.lists(few_letters.filter(bool), max_size=4))
def test_cut_where_they_become_complete_however_the_text_comes(pieces: list[str], stops: list[str]) -> None:
    matcher, given_out, stopped_by, seen = StopStrings(stops), "", None, ""
    for piece in pieces:
        seen += piece
        text, stopped_by = matcher.push(piece)
        given_out += text
        if stopped_by is not None:
            break
        held = len(seen) - len(given_out)
        could_begin = [
            n for n in range(len(seen) + 1) if any(s.startswith(seen[len(seen) - n :]) for s in stops) or n == 0
        ]
        assert held == max(could_begin), "exactly the longest suffix that could begin a stop is held back"
    if stopped_by is None:
        given_out += matcher.flush()
    assert (given_out, stopped_by) == plainly("".join(pieces), stops)


@pytest.mark.parametrize(
    ("pieces", "stop", "out"),
    [
        (["Hel", "lo\n", "\nUs", "er: x"], ["\n\nUser:"], ["Hel", "lo", "", ""]),
        (["a", "a", "b"], ["aab"], ["", "", ""]),
        (["aa", "ab"], ["aab"], ["", "a"]),
        (["ST", "Ox"], ["STOP"], ["", "STOx"]),
    ],
)
def test_what_each_piece_gives_out(pieces: list[str], stop: list[str], out: list[str]) -> None:
    matcher = StopStrings(stop)
    assert [matcher.push(piece)[0] for piece in pieces] == out


def test_the_stop_itself_is_included_on_request() -> None:
    matcher = StopStrings(["END"], include=True)
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.push("D and more") == ("END", "END")
