"""How a cost model is off just now: by one factor for every iteration, and by one for what prompts add to it.

A machine's memory and its arithmetic do not change their speed together: reading the weights may take half as long
again for an hour in which products take what they always do. An iteration without prompts then says nothing of those
with some, and the other way round.
"""

from __future__ import annotations

import math

SURPRISE = math.log(1.5)
"""No iteration is believed to be further off than that: an outlier counts no more than a mild surprise."""
NO_TIME = 1e-9
DRIFT = 0.001
"""By how much the prompts' factor may change from one iteration to the next, squared, over the square of how much
iterations scatter. It is the machine's state of the hour, where the other is that of the moment."""
UNKNOWN = 0.3
"""How far off it may be before anything was seen, likewise."""
MOST_OF_PROMPTS = math.log(2.0)


class Correction:
    """Both factors are random walks in logarithms, seen through iterations that scatter (Kalman, A New Approach to
    Linear Filtering and Prediction Problems, 1960; linearised at the present estimate). How much of a surprise each of
    them is blamed for follows from how much of the iteration it was in, and from how well it is known.
    """

    __slots__ = (
        "_covariance", "_drift", "_most", "_prompts", "_prompts_variance", "_speed", "_speed_variance",
        "of_prompts", "speed",
    )  # fmt: skip

    def __init__(self, step: float, limit: float) -> None:
        """`step`: what part of a surprise every iteration's factor moves by, once all are without prompts. It stays
        within `limit` and its inverse. 0: nothing is learned; always below 1."""
        self.speed = self.of_prompts = 1.0
        self._speed = self._prompts = 0.0
        self._most = math.log(limit)
        # The variance before an iteration with which a filter takes `step` of it, and what brings it back to that.
        self._speed_variance = step / (1 - step)
        self._drift = step * self._speed_variance
        self._prompts_variance, self._covariance = (UNKNOWN, 0.0) if step else (0.0, 0.0)

    def of(self, plain: float, whole: float) -> float:
        """Seconds of an iteration for which the model says `whole`, and `plain` for the same without its prompts."""
        if self.of_prompts == 1.0:  # to the last bit, where the model is right
            return self.speed * whole
        return self.speed * (plain + self.of_prompts * (whole - plain))

    def learn(self, plain: float, whole: float, seconds: float) -> None:
        """From what it took. `whole` is above 0."""
        predicted = self.of(plain, whole)
        share = self.speed * self.of_prompts * (whole - plain) / predicted
        surprise = min(max(math.log(max(seconds / predicted, NO_TIME)), -SURPRISE), SURPRISE)
        with_speed, with_prompts = (
            self._speed_variance + share * self._covariance,
            self._covariance + share * self._prompts_variance,
        )
        scatter = 1.0 + with_speed + share * with_prompts
        self._move(surprise * with_speed / scatter, surprise * with_prompts / scatter)
        self._speed_variance += self._drift - with_speed * with_speed / scatter
        self._covariance -= with_speed * with_prompts / scatter
        learned = with_prompts * with_prompts / scatter
        self._prompts_variance = min(self._prompts_variance - learned + (DRIFT if self._drift else 0.0), UNKNOWN)

    def relax(self, part: float) -> None:
        """Of what the machine is slower by, whichever it is, forget all but that part."""
        self._move((part - 1) * max(self._speed, 0.0), (part - 1) * max(self._prompts, 0.0))

    def _move(self, speed: float, prompts: float) -> None:
        self._speed = min(max(self._speed + speed, -self._most), self._most)
        self._prompts = min(max(self._prompts + prompts, -MOST_OF_PROMPTS), MOST_OF_PROMPTS)
        self.speed, self.of_prompts = math.exp(self._speed), math.exp(self._prompts)
