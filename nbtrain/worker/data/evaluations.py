"""Gives every rank all batches of loops that evaluate, so that a cell counts what one process counts.

A loop evaluates if it begins while gradients are off, or if its code shows that it does not train (`loop_code.py`). It
is dealt out all the same where the code itself brings the ranks' counts together, by `reduce(correct, "sum")` or
`gather`, and with `--share-eval`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from numbers import Integral
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader

from nbtrain.base.errors import UsageError
from nbtrain.worker.batches import joined
from nbtrain.worker.data import loop_code
from nbtrain.worker.data.batch_dealing import following
from nbtrain.worker.ranks import collectives

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
        back to its loop. `gather(values, of=loader)`: `DrawnIndices`."""

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


UNKNOWN = (
    "gather(values, of=loader): which samples the loader has given is not known. It works for a DataLoader with a data "
    "set that has indices, iterated in this cell under torch.no_grad(), or with the model in eval mode"
)


class DrawnIndices:
    """The indices that each loader has drawn in its last evaluation, on one rank.

    `gather(values, of=loader)` puts the results of all ranks in the order of the data set by them. A sample of a batch
    that was filled up, or that several ranks have seen, is in the result once."""

    def __init__(self) -> None:
        self.drawn: WeakKeyDictionary[Any, _IndexNotingSampler] = WeakKeyDictionary()

    def begin(self) -> None:
        self.drawn.clear()

    def noting(self, loader: DataLoader[Any], batches: Any) -> Any:
        """Return a batch sampler that notes its indices."""
        self.drawn[loader] = noted = _IndexNotingSampler(batches)
        return noted

    def indices(self, loader: Any) -> array[int] | None:
        """Those that it has drawn on this rank; None where they are not known."""
        noted = self.drawn.get(loader)
        in_order = getattr(loader, "in_order", True)  # else batches come as workers are done with them
        return noted.drawn if noted is not None and noted.known and in_order else None

    def gather(self, values: Any, loader: Any) -> Any:
        """The values of all samples: a tensor, or a list if `values` is one, or a dict or tuple of such. A list may be
        that of a loop's outputs, one for each batch. Collective."""
        noted = self.drawn.get(loader)
        if (
            isinstance(values, list) and noted is not None and len(values) < len(noted.drawn)
            and isinstance(next(iter(values), None), torch.Tensor | Mapping | list | tuple)
        ):  # fmt: skip
            with suppress(TypeError, RuntimeError, KeyError):  # what cannot be joined is told of as it is
                values = joined(values)
        if isinstance(values, Mapping):
            return {name: self.gather(part, loader) for name, part in values.items()}
        if isinstance(values, tuple):
            parts = [self.gather(part, loader) for part in values]
            return type(values)(*parts) if hasattr(values, "_fields") else tuple(parts)
        rows = values.detach().cpu() if isinstance(values, torch.Tensor) else list(values)
        mine = None if noted is None or not noted.known else (len(values), noted.drawn.tolist(), rows)
        parts = collectives.gather(mine)
        for rank, part in enumerate(parts):
            if part is None:
                raise UsageError(UNKNOWN)
            if part[0] != len(part[1]):
                raise UsageError(
                    f"gather(values, of=loader): rank {rank} has values of {part[0]} samples, and the loader gave it "
                    f"{len(part[1])}. Bring together one value for each sample: torch.cat of a loop's outputs, from "
                    "the loader's first batch to its last"
                )
        place: dict[int, Any] = {}
        for _, indices, values_there in parts:
            for index, row in zip(indices, values_there, strict=True):
                place.setdefault(index, row)
        found = [row for _, row in sorted(place.items(), key=itemgetter(0))]
        if not isinstance(values, torch.Tensor):
            return found
        return torch.stack(found).to(values.device) if found else values[:0]


class _IndexNotingSampler:
    """A batch sampler that notes the indices it gives."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.drawn = array("q")
        self.known = True

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self.batches)  # now: a sampler may draw here
        return self._each(inner)

    def _each(self, inner: Iterator[Any]) -> Iterator[Any]:
        del self.drawn[:]
        for batch in following(inner):
            single = isinstance(batch, Integral)  # with batch_size=None
            try:
                self.drawn.extend([batch] if single else batch)
            except TypeError:  # a sampler of keys
                self.known = False
            yield batch
