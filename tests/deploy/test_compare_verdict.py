"""The verdict of a comparison follows the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deploy.compare.verdict import Score, said

SLO = Score("slo", met=19, ended=20, ttft_p99_s=2.0, stall_s=0.1)
WHOLE = Score("whole", met=8, ended=20, ttft_p99_s=1.0, stall_s=1.5)


def swapped(first: Score, second: Score) -> list[Score]:
    return [replace(first, name=second.name), replace(second, name=first.name)]


def test_the_best_is_named_with_its_price() -> None:
    assert said([WHOLE, SLO]) == (
        "slo is right for this load: 19 of 20 requests as promised, against 8 under whole. Its largest stall is 100 ms "
        "(1.50 s under whole); its P99 TTFT, 2.00 s, is not the shortest (1.00 s under whole)."
    )


def test_with_the_figures_swapped_the_verdict_is_the_other_one() -> None:
    told = said(swapped(WHOLE, SLO))
    assert told.startswith("whole is right for this load: 19 of 20 requests as promised, against 8 under slo.")
    assert "(1.50 s under slo)" in told


def test_the_next_best_and_the_worst() -> None:
    told = said([WHOLE, SLO, replace(WHOLE, name="alternate", met=0), replace(WHOLE, name="chunked", met=15)])
    assert ", against 15 under chunked, the next best, and 0 under alternate, the worst." in told


def test_the_order_does_not_matter() -> None:
    assert said([WHOLE, SLO]) == said([SLO, WHOLE])


def test_a_tie_is_told_and_its_extremes() -> None:
    even = replace(WHOLE, name="separated", met=19)
    told = said([WHOLE, even, SLO])
    assert told == (
        "separated and slo keep the promises equally well: 19 of 20 requests as promised, against 8 under whole. Of "
        "these separated has the shortest P99 TTFT, 1.00 s with stalls of up to 1.50 s, and slo the shortest stall, "
        "100 ms with a P99 TTFT of 2.00 s."
    )
    alike = said([even, SLO])
    assert alike.startswith("All configurations keep the promises equally well: 19 of 20 requests as promised.")
    quick = said([even, replace(SLO, ttft_p99_s=0.5)])
    assert "Of these slo has both the shortest P99 TTFT, 500 ms, and the shortest stall, 100 ms." in quick


@pytest.mark.parametrize(("met", "tied"), [(980, True), (979, False)])
def test_a_tie_is_two_in_a_hundred(met: int, tied: bool) -> None:
    best, other = replace(SLO, met=1000, ended=1000), replace(WHOLE, met=met, ended=1000)
    assert ("equally well" in said([best, other])) == tied


def test_nobody_keeps_the_promises() -> None:
    poor = replace(SLO, met=10)
    told = said([WHOLE, poor])
    assert told.startswith(
        "No configuration keeps the promises for this load; slo comes nearest with 10 of 20 requests as promised."
    )
    none = said([replace(WHOLE, met=0), replace(SLO, met=0)])
    assert none.startswith("No configuration keeps the promises for this load, not to a single request. Of these whole")
    even = said([replace(WHOLE, met=10), poor])
    assert "; whole and slo come, alike, nearest with 10 of 20" in even


def test_the_highest_rate_decides_where_there_are_several() -> None:
    steady, bold = replace(SLO, met=10, rate=2.0), replace(WHOLE, met=12, rate=1.0)
    assert said([bold, steady]).startswith(
        "slo is right for this load: 10 of 20 requests as promised and 90% or more of them up to 2 a second, against "
        "12 and 90% or more of them up to 1 a second under whole."
    )
    told = said([replace(bold, rate=0.0), replace(steady, rate=0.0)])
    assert told.startswith("No configuration keeps the promises for this load; whole comes nearest")
    assert "at no rate" in told


def test_nothing_promised_and_nothing_to_compare_with() -> None:
    assert said([WHOLE, SLO], promised=False).startswith("Nothing was promised, so no configuration is called right.")
    alone = said([SLO])
    assert alone == ("Only slo was run to its end: 19 of 20 requests as promised. So there is nothing to compare.")
    assert "nothing promised" in said([SLO], promised=False)


@pytest.mark.parametrize(
    "scores", [[WHOLE, SLO], [SLO], [SLO, replace(SLO, name="b")], [WHOLE, replace(WHOLE, name="b")]]
)
def test_a_verdict_has_two_sentences(scores: list[Score]) -> None:
    told = said(scores)
    assert told.count(". ") == 1
    assert told.endswith(".")
