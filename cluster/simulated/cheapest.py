"""The fewest GPUs, or the least money, that carry a load: every kind of group is tried, and each has its reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.simulated.seen import Simulation

FEW = 8
"""A kind of group that needs this many times the best one's price is not searched to its end."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Groups of `tp` GPUs by name under a policy."""

    gpu: str
    tp: int
    policy: str


@dataclass(frozen=True, slots=True)
class Offer:
    """What a kind of group needs for the load. `groups` None: no number of groups that was tried carries it, for the
    reason in `why`; otherwise `why` says what breaks with one group less. `price` is GPUs, or money an hour."""

    kind: Kind
    groups: int | None
    price: float | None
    attainment: float | None
    why: str

    @property
    def gpus(self) -> int | None:
        return None if self.groups is None else self.groups * self.kind.tp


Try = Callable[[Kind, int], Simulation]
"""The load on so many groups of a kind. Raises ValueError, in one line, where such a group cannot be."""
Broken = Callable[[Simulation], str]
"""What does not hold in a run; empty where everything does."""


def cheapest(
    kinds: Sequence[Kind],
    try_out: Try,
    broken: Broken,
    prices: Mapping[str, float] | None = None,
    most_gpus: int = 1024,
    say: Callable[[str], None] = lambda line: None,
) -> list[Offer]:
    """Offers, the cheapest first, those that cannot carry the load last.

    `prices` are money an hour by GPU; without them a GPU counts 1. A kind is given up where it is certain to need more
    than `most_gpus`, or several times what the best so far does.
    """
    offers: list[Offer] = []
    for kind in kinds:
        one = kind.tp * (1.0 if prices is None else prices[kind.gpu])
        best = min((offer.price for offer in offers if offer.price is not None), default=math.inf)
        most = max(1, min(most_gpus // kind.tp, int(FEW * best / one) if best < math.inf else most_gpus))
        offers.append(_offer(kind, most, one, try_out, broken))
        say(f"{kind.gpu} x {kind.tp}, {kind.policy}: " + _told(offers[-1]))
    return sorted(offers, key=lambda offer: (offer.price is None, offer.price or 0.0, offer.gpus or 0))


def _offer(kind: Kind, most: int, one: float, try_out: Try, broken: Broken) -> Offer:
    """The fewest groups, by doubling until they carry the load and bisection between."""
    failed, why = 0, ""
    carried: tuple[int, Simulation] | None = None
    groups = 1
    try:
        while carried is None:
            run = try_out(kind, groups)
            said = broken(run)
            if not said:
                carried = groups, run
            elif groups == most:
                return Offer(kind, None, None, run.attainment, f"not with {most} groups: {said}")
            else:
                failed, why, groups = groups, said, min(2 * groups, most)
        while carried[0] - failed > 1:
            groups = (failed + carried[0]) // 2
            run = try_out(kind, groups)
            said = broken(run)
            if said:
                failed, why = groups, said
            else:
                carried = groups, run
    except ValueError as error:
        return Offer(kind, None, None, None, str(error))
    needed, run = carried
    return Offer(kind, needed, needed * one, run.attainment, f"with {failed}: {why}" if failed else "one is enough")


def _told(offer: Offer) -> str:
    return f"{offer.gpus} GPUs" if offer.groups is not None else offer.why
