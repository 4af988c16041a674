"""What a strategy hands back is looked at once: one that is written in a cell may well hand back something else."""

from __future__ import annotations

from nbtrain.errors import UsageError
from nbtrain.strategies.base import Component, Prepared, Strategy


def share_of(strategy: Strategy, rank: int, world_size: int) -> tuple[int, int]:
    """(index, count) of the batches that this rank sees."""
    found = strategy.share(rank, world_size)
    match found:
        case (int(index), int(count)) if 0 <= index < count:
            return index, count
    raise UsageError(
        f"{type(strategy).__name__}.share({rank}, {world_size}) returned {found!r}: it has to return (index, count), "
        "which of so many shares of the batches this rank sees, index being less than count"
    )


def set_up(strategy: Strategy, component: Component, precision: str) -> Prepared:
    prepared = strategy.set_up(component, precision)
    if not isinstance(prepared, Prepared):
        raise UsageError(
            f"{type(strategy).__name__}.set_up returned {type(prepared).__name__}: it has to return an "
            "nbtrain.Prepared, as in `return nbtrain.Prepared(component)`"
        )
    if getattr(prepared, "component", None) is not component:
        raise UsageError(
            f"what {type(strategy).__name__}.set_up returned has another component, or none: an `__init__` of a class "
            "of your own has to call super().__init__(component)"
        )
    if hasattr(prepared, "clip_value"):
        raise UsageError(
            f"{type(prepared).__name__}.clip_value is not called any more: write before_clip_value(self, parameters)"
        )
    return prepared
