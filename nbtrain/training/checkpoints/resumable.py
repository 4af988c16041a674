"""`resumable`: a loop that goes on where it was when the checkpoint was made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from nbtrain.training.checkpoints.api import current

T = TypeVar("T")


class resumable(Generic[T]):
    """`for epoch in resumable(range(10)):` begins, after `load`, with the epoch that was under way, and in there the
    loaders pass over the batches that were seen. A loader by itself can be given, too: `for x, y in resumable(loader)`.

    Without a `load` before it, it is a loop like any other. Write `save` last in the loop's body: what comes after it
    would be left out.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        found: Iterator[Any] = current().positions.loop(self.items)
        return found
