"""What is not interrupted in its middle. Interrupts know these functions by their code, and come before or after."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def together(what: Callable[[], T]) -> T:
    """All ranks settle something, and then each does its part: one that left on the way would leave the others with
    less than that."""
    return what()


def changing(what: Callable[[], T]) -> T:
    """Objects are changed one after another. Where even so something raises in here, they are left half way."""
    return what()
