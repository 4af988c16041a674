"""Tells what becomes of gradients between cells, where a loop counts on them.

Gradients do not travel. They wait on the ranks for the next cell: one may call `backward`, and another `step`. So what
the notebook does with its own meanwhile (`optimizer.zero_grad()`, a backward, `p.grad = …`) is not seen here; and where
ranks begin anew (a cell failed, another strategy, other devices) theirs are lost. A step would do nothing, or a
backward would add to what was to be cleared, silently. Who clears gradients first in the cell does not miss any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.compat.dtensor import is_divided, local
from nbtrain.compat.intercept import Listeners
from nbtrain.compat.tensors import version

LOST = (
    "{} stepped without gradients that an earlier cell had left on the ranks: they do not come home, and are gone "
    "since the ranks began anew (after a cell that failed or was stopped, after a trial, for another strategy, on "
    "other devices). Run that cell's backward again in the cell that steps; where these gradients are not wanted, call "
    "optimizer.zero_grad() first."
)
ADDED = (
    "backward has added to gradients that an earlier cell had left on the ranks, as it does in one process. A "
    "zero_grad in the notebook, between the cells, does not reach them: call optimizer.zero_grad() in the cell, before "
    "the backward"
)
IN_NOTEBOOK = (
    "the notebook has gradients (of a backward there, or put into p.grad), and gradients do not travel: this cell has "
    "{} without them. Run that backward in the cell; where they are not wanted, call optimizer.zero_grad() first, in "
    "the cell"
)


NOTHING = 0, 0


def _stand(grad: torch.Tensor | None) -> tuple[int, int]:
    if grad is None:
        return NOTHING
    return id(grad), version(local(grad) if is_divided(grad) else grad)


class GradientsBetweenCells:
    """Listens in a cell that may count on gradients of before, until something settles it."""

    def __init__(self) -> None:
        self.lost: dict[int, int] = {}
        """id → key of the tensors whose gradients were lost, and which nothing has cleared or missed since"""
        self._left: dict[int, torch.Tensor] = {}
        """tensors that had a gradient here when the cell began"""
        self._in_notebook: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[int, int]] = {}
        """their gradients before the cell's first backward: a strategy may show others before the cell begins"""
        self.waiting = False
        """something is still to be settled"""
        self.advice: dict[str, str] = {}
        self._said: list[str] = []
        self._listeners = Listeners()

    def begin(
        self, lost: Mapping[int, Any], left: Iterable[torch.Tensor] = (), in_notebook: Iterable[Any] = ()
    ) -> None:
        """`lost`: key → tensor. `left`: tensors that have a gradient here. `in_notebook`: those that have one there."""
        self._said, self.advice = [], {}
        self.lost = {id(tensor): key for key, tensor in lost.items()}
        self._left = {id(tensor): tensor for tensor in left}
        self._in_notebook = {id(tensor): tensor for tensor in in_notebook}
        self._before = {}
        self.waiting = bool(self.lost or self._left or self._in_notebook)
        if self.waiting:
            for path in ("torch.optim.Optimizer.zero_grad", "torch.nn.Module.zero_grad"):
                self._listeners.listen(path, "lost", self._zero_grad)

    def end(self) -> list[str]:
        """After the cell; returns what is to be told."""
        self._listeners.close()
        if self._before:
            self._look(list(self._before))
        self._left.clear()
        self._in_notebook.clear()
        return self._said

    def backward(self) -> None:
        """Before one begins."""
        if not self._before:
            every = self._left | self._in_notebook
            self._before = {number: _stand(tensor.grad) for number, tensor in every.items()}

    def _look(self, ids: Iterable[int]) -> None:
        """Whether a backward of this cell has added to these gradients: one of another model says nothing of them."""
        for each in ids if self._before else ():
            tensor = self._left.get(each, self._in_notebook.get(each))
            if tensor is None or _stand(tensor.grad) in (NOTHING, self._before.get(each)):
                continue
            if each in self._left and self._before.get(each) != NOTHING:
                self.advice["added gradients"] = ADDED
            if each in self._in_notebook:
                self.advice["gradients of the notebook"] = IN_NOTEBOOK.format("run a backward")

    def stepped(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._in_notebook.keys().isdisjoint(map(id, parameters)):
            self.advice["gradients of the notebook"] = IN_NOTEBOOK.format("stepped")
        if self._settle(parameters):
            self._said = [LOST.format(type(optimizer).__name__)]

    def _settle(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether gradients of these were lost."""
        ids = list(map(id, tensors))
        self._look(ids)
        for each in ids:
            self._left.pop(each, None)
            self._in_notebook.pop(each, None)
        keys = [self.lost.pop(each, None) for each in ids]
        self.waiting = bool(self.lost or self._left or self._in_notebook)
        return any(key is not None for key in keys)

    def _zero_grad(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            groups = [owner.parameters()] if isinstance(owner, nn.Module) else [g["params"] for g in owner.param_groups]
            self._settle([p for group in groups for p in group])
            return old(owner, *args, **kwargs)

        return zero_grad
