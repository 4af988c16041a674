"""Gives every rank all batches of loops that evaluate, so that a cell counts what one process counts.

A loop evaluates if it begins while gradients are off, or if its code shows that it does not train (`loop_code.py`). It
is dealt out all the same where the code itself brings the ranks' counts together, by `reduce(correct, "sum")` or
`gather`, and with `--share-eval`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

from nbtrain.base.errors import UsageError
from nbtrain.worker.data import loop_code
from nbtrain.worker.data.gather_in_order import DrawnIndices

SLOW = 20.0
"""Seconds of evaluations from which on --share-eval is suggested, if they take more than PART of the cell's time."""
PART = 0.25


class Evaluations:
    """Decides which loaders a rank sees whole in a cell, and notes what to say about that."""

    def __init__(self, models: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self.models = models
        self.clock = time.monotonic
        self.orders = DrawnIndices()
        self.begin(1, True)

    def begin(self, count: int, share: bool) -> None:
        """`count`: ranks, or groups of ranks, to which batches are dealt out. `share`: those of evaluations as well."""
        self.count, self.several, self.share = count, count > 1, share
        self.began, self.seconds = self.clock(), 0.0
        self.evaluating = False
        """the loop that begins does not train"""
        self.orders.begin()
        self.always = False
        """all loaders are of an evaluation, whatever the code around says"""
        self.seen: WeakKeyDictionary[Any, set[bool]] = WeakKeyDictionary()
        """loader → whether it was seen whole, a share of it, or both"""
        self.told: WeakKeyDictionary[Any, set[bool]] = WeakKeyDictionary()
        """loader → whether `len` was that of the whole, of a share, or both"""
        self.open: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        """iterator of a loader that is seen whole → when it began"""
        self.known: dict[Any, bool] = {}
        self.dealt = False
        """a loop sees this rank's share"""
        self.repeated = ""
        """the call that reduced or gathered equal values after a loader that each rank has seen whole"""

    # -- what loaders ask -------------------------------------------------------------------------

    @contextmanager
    def seen_whole(self) -> Iterator[None]:
        """Inside, loaders begin, and have their length, as in one process."""
        before, self.always = self.always, True
        try:
            yield
        finally:
            self.always = before

    def opens(self, loader: DataLoader[Any]) -> bool:
        """Whether the loop that begins sees all batches."""
        if self.always:
            self.evaluating = True
            return self.several
        around = loop_code.places()
        self.evaluating = not torch.is_grad_enabled() or loop_code.evaluates(around, self.models())
        if not self.several:
            return False
        share = (self.share and not loop_code.updates_statistics()) or self._together(around, loader)
        every_batch = self.evaluating and not share
        self.seen.setdefault(loader, set()).add(every_batch)
        if not every_batch:
            self.dealt = True
        return every_batch

    def length(self, loader: DataLoader[Any]) -> bool:
        """Whether `len(loader)` is that of all batches."""
        if self.always:
            return self.several
        if not self.several or self.share:
            return False
        around = loop_code.places()
        every_batch = loop_code.length_of_evaluation(around, loader, self.models())
        seen = self.seen.get(loader)
        if every_batch is None:
            every_batch = seen == {True} if seen is not None else not torch.is_grad_enabled()
        self.told.setdefault(loader, set()).add(every_batch)
        return every_batch

    def opened(self, iterator: Any) -> None:
        """An iteration begins that sees all batches."""
        self.open[iterator] = self.clock()

    def exhausted(self, iterator: Any) -> None:
        if (began := self.open.pop(iterator, None)) is not None:
            self.seconds += self.clock() - began

    # -- what the cell calls ----------------------------------------------------------------------

    def watching(self, reduce: Callable[..., Any], gather: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        """Both functions, which note equal values on all ranks: a count in an object (`self.correct`) cannot be traced
        back to its loop. `gather(values, of=loader)`: see `gather_in_order.py`."""

        @wraps(reduce)
        def reducing(value: Any, op: str = "mean") -> Any:
            reduced = reduce(value, op)
            if op == "sum" and self._saw_whole and _is(reduced, value * self.count):
                self.repeated = self.repeated or 'reduce(…, "sum")'
            return reduced

        @wraps(gather)
        def gathering(value: Any, of: Any = None, sync_grads: bool = False) -> Any:
            if of is not None:
                if sync_grads:
                    raise UsageError("gather(values, of=loader) is for evaluations; sync_grads=True goes without `of`")
                return self.orders.gather(value, of)
            gathered = gather(value, sync_grads)
            if (
                self._saw_whole
                and len(gathered) > 1
                and all(_is(value_of_rank, gathered[0]) for value_of_rank in gathered[1:])
            ):
                self.repeated = self.repeated or "gather(…)"
            return gathered

        return {"reduce": reducing, "gather": gathering}

    @property
    def _saw_whole(self) -> bool:
        return any(True in answers for answers in self.seen.values())

    # -- what is said -----------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """Sentences for the user, when the cell is over."""
        notes = []
        if self.repeated:
            notes.append(
                f"{self.repeated} brought together what is the same on every rank. If it is of the loop that "
                f"evaluates, every rank has seen all of its batches, and each sample is there {self.count} times: "
                "leave the call out, or write --share-eval"
            )
        if any(self.seen.get(loader) == {True} and False in told for loader, told in self.told.items()):
            notes.append(
                "len(loader) was that of a rank's share, and the loop that evaluates has seen all batches: write "
                "len(loader) in the function with the loop, or inside of torch.no_grad()"
            )
        if self.seconds > SLOW and self.seconds > PART * (self.clock() - self.began):
            notes.append(
                f"evaluating took {self.seconds:.0f} s, for every rank sees all batches, so that what it counts is "
                'right. --share-eval shares them out; then reduce(correct, "sum") is the sum over the ranks'
            )
        return notes

    def _together(self, around: list[loop_code.UserFrame], loader: DataLoader[Any]) -> bool:
        """Whether the code brings the ranks' counts together by itself. Looked up once for each place in a cell."""
        key = id(loader), *((id(here.scope), here.line) for here in around)
        if key not in self.known:
            self.known[key] = loop_code.brought_together(around)
        return self.known[key]


def _is(value: Any, other: Any) -> bool:
    """Whether the numbers are equal. Zeros do not count: they say nothing."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(value, other) and bool(value.count_nonzero())
    return isinstance(value, (int, float)) and isinstance(other, (int, float)) and value == other != 0
