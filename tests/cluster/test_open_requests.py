"""What a front end keeps, so that it can give its open requests again."""

from __future__ import annotations

from cluster.open_requests import OpenRequests
from scheduler.request import Delta, Finish, Request
from scheduler.slo import Grant, Promise


def opened(*names: str) -> OpenRequests:
    requests = OpenRequests()
    for name in names:
        requests.open(Request(name, (1, 2), 10, produced=(3,), age_s=5.0))
    return requests


def test_what_was_seen_is_not_asked_for_again() -> None:
    requests = opened("a", "b", "c")
    requests.admitted(["a", "b", "unknown"])
    requests.see([Delta("a", (4,)), Delta("b", (4,)), Delta("a", (5, 6)), Delta("unknown", (9,))])
    admitted, new = requests.again()
    assert [(r.request_id, r.produced) for r in admitted] == [("a", (3, 4, 5, 6)), ("b", (3, 4))]
    assert [(r.request_id, r.produced) for r in new] == [("c", (3,))]
    assert all(r.age_s >= 5.0 and r.prompt == (1, 2) and r.max_tokens == 10 for r in (*admitted, *new))


def test_what_is_finished_or_left_is_not_given_again() -> None:
    requests = opened("finished", "left")
    requests.see([Delta("finished", (4,), finish=Finish.STOP)])
    requests.close("left")
    assert requests.again() == ([], [])
    assert len(requests) == 0


def test_what_was_to_end_has_ended() -> None:
    requests = opened("aborted", "stopped", "running")
    requests.ends("aborted", Finish.ABORT)
    requests.ends("stopped", Finish.STOP)
    requests.ends("unknown", Finish.STOP)
    assert requests.take_ended() == [Delta("aborted", finish=Finish.ABORT), Delta("stopped", finish=Finish.STOP)]
    assert requests.take_ended() == []
    assert [r.request_id for r in requests.again()[1]] == ["running"]


def test_a_promise_that_was_relaxed_stays_so() -> None:
    requests = opened("a")
    requests.see([Delta("a", grant=Grant(Promise(9.0, 1.0), 8.0))])
    (admitted,), none = requests.again()
    assert (admitted.promise, none) == (Promise(9.0, 1.0), []), "what is heard of it comes from who has admitted it"
