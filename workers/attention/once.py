"""What a backend makes of a forward's layout, made once and not in each of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

from workers.attention.base import Layout

P = ParamSpec("P")
Made = TypeVar("Made")


class OncePerForward(Generic[P, Made]):
    """Of the latest layout it was asked for; what else `make` takes is the same in all layers."""

    def __init__(self, make: Callable[Concatenate[Layout, P], Made]) -> None:
        self._make = make
        self._layout: Layout | None = None
        self._made: Made | None = None

    def of(self, layout: Layout, /, *args: P.args, **kwargs: P.kwargs) -> Made:
        if self._made is None or self._layout is not layout:
            self._layout, self._made = layout, self._make(layout, *args, **kwargs)
        return self._made
