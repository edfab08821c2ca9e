"""What a backend makes of a forward's layout, made once and not in each of its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from workers.attention.base import Layout

Made = TypeVar("Made")


class OncePerForward(Generic[Made]):
    """Of the latest layout it was asked for, and of pages with so many tokens in a block."""

    def __init__(self, make: Callable[[Layout, int], Made]) -> None:
        self._make = make
        self._layout: Layout | None = None
        self._made: Made | None = None

    def of(self, layout: Layout, block_size: int) -> Made:
        if self._made is None or self._layout is not layout:
            self._layout, self._made = layout, self._make(layout, block_size)
        return self._made
