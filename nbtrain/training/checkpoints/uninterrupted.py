"""Functions that an interrupt does not cut short. Interrupts know them by their code, and wait for their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def together(what: Callable[[], T]) -> T:
    """Something that needs every rank to its end."""
    return what()


def changing(what: Callable[[], T]) -> T:
    """Objects are changed one after another. An exception in here leaves them half changed."""
    return what()
