"""A group that outlasts its processes, with groups made up: when it is tried again, and when it is given up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from cluster import rebuild
from cluster.group import WorkerGroup
from cluster.rebuild import MOST_IN_A_ROW, LastingGroup
from cluster.recovery import WorkersLost
from scheduler.plan import IterationPlan, IterationResult


class MadeUpGroup:
    """What a LastingGroup asks of a group. `mute` are the ranks that do not answer."""

    def __init__(self, mute: str = "") -> None:
        self.mute = mute
        self.destroyed = False
        self.calls: list[Callable[[], None]] = []

    async def execute(self, plan: IterationPlan) -> IterationResult:
        return IterationResult(plan.iteration, ())

    async def destroy(self) -> None:
        self.destroyed = True

    async def silent(self) -> str:
        return self.mute

    def obituary(self) -> str:
        return ""

    def on_death(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


class Starts:
    """Gives groups or raises, as told."""

    def __init__(self, *outcomes: MadeUpGroup | Exception) -> None:
        self.outcomes = list(outcomes)
        self.count = 0

    async def __call__(self) -> WorkerGroup:
        self.count += 1
        outcome = self.outcomes.pop(0) if self.outcomes else MadeUpGroup()
        if isinstance(outcome, Exception):
            raise outcome
        return cast(WorkerGroup, outcome)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "PAUSES_S", (0.0, 0.0, 0.0))


def begin(starts: Starts) -> Any:
    return LastingGroup.begin(starts, "the worker group", hang_seconds=30)


async def test_a_group_is_replaced_and_the_cause_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    first, second = MadeUpGroup(), MadeUpGroup()
    group = await begin(Starts(first, second))
    woken: list[None] = []
    group.watch(lambda: woken.append(None))
    with caplog.at_level(logging.ERROR):
        assert await group.replace(WorkersLost("rank 1 (pid 7) died")) is group
    assert first.destroyed
    assert not second.destroyed
    assert caplog.messages == ["the worker group: rank 1 (pid 7) died; rebuilding it"]
    second.calls[0]()
    assert woken == [None], "the new group is watched as well"


async def test_a_start_that_fails_is_tried_again() -> None:
    starts = Starts(MadeUpGroup(), ConnectionError("no raylet"), TimeoutError(), MadeUpGroup())
    group = await begin(starts)
    await group.replace(WorkersLost("rank 0 died"))
    assert starts.count == 4
    assert [line for line in group.incidents if "could not be" in line] == [
        "the worker group: could not be rebuilt: ConnectionError: no raylet",
        "the worker group: could not be rebuilt: TimeoutError",
    ]


async def test_after_three_starts_that_fail_it_is_given_up() -> None:
    starts = Starts(MadeUpGroup(), *[ConnectionError("no raylet")] * 3)
    group = await begin(starts)
    with pytest.raises(WorkersLost, match="rank 0 died, and no new group could be started: ConnectionError: no raylet"):
        await group.replace(WorkersLost("rank 0 died"))
    assert starts.count == 4


async def test_what_an_operator_has_to_remove_is_not_tried_again() -> None:
    starts = Starts(MadeUpGroup(), ValueError("2 ranks need 2 GPU, but 1 are free"))
    group = await begin(starts)
    with pytest.raises(WorkersLost, match="but 1 are free"):
        await group.replace(WorkersLost("rank 0 died"))
    assert starts.count == 2


async def test_one_that_dies_again_and_again_is_given_up_unless_it_gets_something_done() -> None:
    group = await begin(Starts())
    for _ in range(MOST_IN_A_ROW):
        await group.replace(WorkersLost("rank 0 died"))
    await group.execute(IterationPlan(1, ()))
    for _ in range(MOST_IN_A_ROW):
        await group.replace(WorkersLost("rank 0 died"))
    with pytest.raises(WorkersLost, match=f"{MOST_IN_A_ROW} times in a row"):
        await group.replace(WorkersLost("rank 0 died"))


@pytest.mark.parametrize(
    ("mute", "said"),
    [
        ("rank 1 (pid 7)", "rank 1 (pid 7) hung: no answer within 31 s"),
        ("", "no answer within 31 s, although every rank is there"),
    ],
)
async def test_it_is_said_who_hung(mute: str, said: str) -> None:
    group = await begin(Starts(MadeUpGroup(mute)))
    await group.replace(WorkersLost("no answer within 31 s", hung=True))
    assert group.incidents[0] == f"the worker group: {said}; rebuilding it"
