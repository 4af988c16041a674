"""Stage 3: when a cell may read and write an engine's parameters as wholes (`whole_parameters.py`), and how one is
gathered and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.deepspeed.whole_parameters import WholeParameter, WholeView, in_methods, readers
from nbtrain.strategies.kit import shown_weights

if TYPE_CHECKING:
    from nbtrain.strategies.deepspeed.weights import EngineWeights

ALONE = (
    "a parameter that is read or written outside of the model's forward needs every rank under deepspeed stage 3: "
    "write the line above `if rank == 0:`, not below"
)
WRITTEN_BETWEEN = (
    "a weight was written between two layers of a forward, and under deepspeed stage 3 it is already being gathered "
    "for its layer: write it before or after the model is called"
)
FOLLOWED = 3
"""first forwards of an engine; and then the 8th, 16th, 32nd …"""
LATE = (
    "a forward has written to a weight, and none of the first three did: under deepspeed stage 3 only these are looked "
    "at, and some later ones, so that what was written in between may be lost. Write it in the loop, before or after "
    "the model is called"
)


class ParameterAccess:
    """Lets a cell read and write one engine's parameters. It is `suspended` in a backward, a step and most forwards."""

    def __init__(self, weights: EngineWeights, parameters: Iterable[torch.Tensor], opens: Callable[[], None]) -> None:
        """`opens`: called in a backward before a gradient comes by way of a whole."""
        self.weights, self.opens = weights, opens
        self.parameters = [p for p in parameters if type(p) is nn.Parameter]
        self.views: WeakSet[WholeView] = WeakSet()
        self.depth = 1
        """how many have suspended it"""
        self.forwards, self.writes = 0, False
        """forwards so far, and whether one has written to weights"""
        self.late = False
        """one is looked at that is none of the first"""

    def begin(self) -> None:
        for p in self.parameters:
            readers[id(p)] = self
        self.resume()

    def end(self) -> None:
        self.suspend()
        for p in self.parameters:
            readers.pop(id(p), None)

    def settle(self) -> None:
        """When the cell has ended, or parameters are no longer in pieces."""
        views = [view for view in self.views if isinstance(view, WholeView)]  # not settled before
        for view, place in [(view, view.place()) for view in views]:  # one may be made of another
            view.settle()
            if place is not None:
                shown_weights.note(view, *place)
        self.views.clear()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Meanwhile, parameters have the class that DeepSpeed expects."""
        self.suspend()
        try:
            yield
        finally:
            self.resume()

    def in_model(self, is_forward: bool) -> AbstractContextManager[None]:
        """While a method of a model's runs. Of forwards the first are followed, and all where one of these writes: to
        ask for each operation is 30 calls a layer."""
        self.forwards += is_forward
        late = is_forward and self.forwards > FOLLOWED and not self.writes
        unseen = late and (self.forwards < 8 or self.forwards & (self.forwards - 1))
        return self.suspended() if unseen else self._followed(late)

    @contextmanager
    def _followed(self, late: bool) -> Iterator[None]:
        in_methods.append(self)
        before, self.late = self.late, late
        try:
            yield
        finally:
            in_methods.pop()
            self.late = before

    def suspend(self) -> None:
        self.depth += 1
        if self.depth == 1:
            for p in self.parameters:
                p.__class__ = nn.Parameter

    def resume(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            for p in self.parameters:
                p.__class__ = WholeParameter

    def gather(self, p: torch.Tensor) -> torch.Tensor:
        try:
            return self.weights.whole(p)
        except NotSupported as error:
            raise NotSupported(f"{error}. Also, {ALONE}") from None

    def write(self, p: Any, full: torch.Tensor) -> None:
        """Every rank takes rank 0's: what was drawn at random differs between them."""
        if self.late:
            raise NotSupported(LATE)
        self.writes = self.writes or self in in_methods
        if self in in_methods and self.weights.is_on_its_way(p):
            raise NotSupported(WRITTEN_BETWEEN)
        full = full.detach().contiguous()
        dist.broadcast(full, 0)
        self.weights.load(p, full)
