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
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import DataLoader

from nbtrain.compat.dtensor import is_divided, local
from nbtrain.compat.tensors import version
from nbtrain.errors import UsageError
from nbtrain.training.data import loop_code
from nbtrain.training.data.gather_in_order import DrawnIndices
from nbtrain.training.loop.steps import Steps

SLOW = 20.0
"""Seconds of evaluations from which on --share-eval is suggested, if they take more than PART of the cell's time."""
PART = 0.25


class Evaluations:
    """Decides which loaders a rank sees whole in a cell, and notes what to say about that."""

    def __init__(self, steps: Steps, models: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self.steps = steps
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
        self.open: WeakKeyDictionary[Any, tuple[float, int]] = WeakKeyDictionary()
        """iterator of a loader that is seen whole → when it began, and after how many steps"""
        self.known: dict[Any, bool] = {}
        self.divided: dict[tuple[str, str, int], None] = {}
        self.trained = self.dealt = False
        """a loop that evaluates has trained; a loop sees this rank's share"""
        self.weights: WeakKeyDictionary[Any, WeightsBefore] = WeakKeyDictionary()
        """iterator of a loader that is seen whole, of which one batch was used at the most → the weights before it"""
        self.by_hand = False
        """a loop that evaluates has changed the weights by itself"""
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
        whole = self.evaluating and not self.share and not self._together(around, loader)
        self.seen.setdefault(loader, set()).add(whole)
        if not whole:
            self.dealt = True
            self._divides(around, loader)
        return whole

    def length(self, loader: DataLoader[Any]) -> bool:
        """Whether `len(loader)` is that of all batches."""
        if self.always:
            return self.several
        if not self.several or self.share:
            return False
        around = loop_code.places()
        whole = loop_code.length_of_evaluation(around, loader, self.models())
        seen = self.seen.get(loader)
        if whole is None:
            whole = seen == {True} if seen is not None else not torch.is_grad_enabled()
        self.told.setdefault(loader, set()).add(whole)
        return whole

    def opened(self, iterator: Any) -> None:
        """An iteration begins that sees all batches."""
        self.open[iterator] = self.clock(), self.steps.calls
        if self.several and not self.by_hand:
            self.weights[iterator] = WeightsBefore(self.models())

    def asked(self, iterator: Any) -> None:
        """The loop asks for the next batch."""
        if self.open and (began := self.open.get(iterator)) is not None and began[1] != self.steps.calls:
            del self.open[iterator]
            self.trained = True
        if self.weights and (weights := self.weights.get(iterator)) is not None:
            weights.asked += 1
            if weights.asked == 2:  # one batch was worked on: that is enough
                del self.weights[iterator]
                self.by_hand = self.by_hand or weights.changed()

    def exhausted(self, iterator: Any) -> None:
        if (began := self.open.pop(iterator, None)) is not None:
            self.seconds += self.clock() - began[0]

    # -- what the cell calls ----------------------------------------------------------------------

    def watching(self, reduce: Callable[..., Any], gather: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        """Both functions, which note equal values on all ranks: a count in an object (`self.correct`) cannot be traced
        back to its loop. `gather(values, of=loader)`: see `gather_in_order.py`."""

        @wraps(reduce)
        def reducing(value: Any, op: str = "mean") -> Any:
            found = reduce(value, op)
            if op == "sum" and self._saw_whole and _is(found, value * self.count):
                self.repeated = self.repeated or 'reduce(…, "sum")'
            return found

        @wraps(gather)
        def gathering(value: Any, of: Any = None, sync_grads: bool = False) -> Any:
            if of is not None:
                if sync_grads:
                    raise UsageError("gather(values, of=loader) is for evaluations; sync_grads=True goes without `of`")
                return self.orders.gather(value, of)
            found = gather(value, sync_grads)
            if self._saw_whole and len(found) > 1 and all(_is(one, found[0]) for one in found[1:]):
                self.repeated = self.repeated or "gather(…)"
            return found

        return {"reduce": reducing, "gather": gathering}

    @property
    def _saw_whole(self) -> bool:
        return any(True in whole for whole in self.seen.values())

    # -- what is said -----------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """Sentences for the user, when the cell is over."""
        found = [
            f"{divisor} is of all ranks, and {what} is of this rank's share (line {line}): write "
            f'reduce({what}, "sum") / {divisor}'
            for what, divisor, line in self.divided
        ]
        if self.repeated:
            found.append(
                f"{self.repeated} brought together what is the same on every rank. If it is of the loop that "
                f"evaluates, every rank has seen all of its batches, and each sample is there {self.count} times: "
                "leave the call out, or write --share-eval"
            )
        if self.trained:
            found.append(
                "a loop whose model is in eval mode, or that began under no_grad, has trained: every rank saw the same "
                "batches there, so its steps are those of one process. Call model.train() before the loop, or write "
                "--share-eval"
            )
        elif self.by_hand:
            found.append(
                f"a loop without backward() and optimizer.step() has changed the weights: all {self.count} ranks saw "
                "all of its batches and did the work of one, and the weights are those of one process. To share it out "
                "write --share-eval, and bring together what each rank computes of its batch: g = reduce(g)"
            )
        if any(self.seen.get(loader) == {True} and False in told for loader, told in self.told.items()):
            found.append(
                "len(loader) was that of a rank's share, and the loop that evaluates has seen all batches: write "
                "len(loader) in the function with the loop, or inside of torch.no_grad()"
            )
        if self.seconds > SLOW and self.seconds > PART * (self.clock() - self.began):
            found.append(
                f"evaluating took {self.seconds:.0f} s, for every rank sees all batches, so that what it counts is "
                'right. --share-eval shares them out; then reduce(correct, "sum") is the sum over the ranks'
            )
        return found

    def _together(self, around: list[loop_code.UserFrame], loader: DataLoader[Any]) -> bool:
        """Whether the code brings the ranks' counts together by itself. Looked up once for each place in a cell."""
        key = id(loader), *((id(here.scope), here.line) for here in around)
        if key not in self.known:
            self.known[key] = loop_code.brought_together(around)
        return self.known[key]

    def _divides(self, around: list[loop_code.UserFrame], loader: DataLoader[Any]) -> None:
        """A loop that sees a share of the batches begins: note whether it divides by the number of all samples."""
        key = "divides", *((id(here.scope), here.line) for here in around)
        if key in self.known or self._together(around, loader):
            return
        self.known[key] = True
        try:
            samples = len(loader.dataset)  # type: ignore[arg-type]  # or it has no length
        except TypeError:
            return
        if samples > 1 and (found := loop_code.divided_by(around, samples)) is not None:
            self.divided[found] = None


class WeightsBefore:
    """The weights when a loop begins, to see whether it changes them without an optimizer."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self.asked = 0
        held = [p for model in models for p in model.parameters() if type(p) is torch.nn.Parameter or is_divided(p)]
        self._versions = [(ref(p), version(p)) for p in held]
        parts = [(p, local(p) if is_divided(p) else p) for p in held]
        least = min(
            (pair for pair in parts if pair[1].numel()),
            key=lambda pair: (not pair[0].requires_grad, pair[1].numel()),
            default=None,
        )
        self._least = None if least is None else (ref(least[0]), least[1].detach().clone())

    def changed(self) -> bool:
        """Whether one was written to; by `p.data` too, which counts as no new version, where that is all of them."""
        if any((p := one()) is not None and version(p) != before for one, before in self._versions):
            return True
        if self._least is None or (now := self._least[0]()) is None:
            return False
        return not torch.equal(local(now) if is_divided(now) else now.detach(), self._least[1])


def _is(one: Any, other: Any) -> bool:
    """Whether the numbers are equal. Zeros do not count: they say nothing."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other) and bool(one.count_nonzero())
    return isinstance(one, (int, float)) and isinstance(other, (int, float)) and one == other != 0
