"""Tells when an optimizer steps without gradients that an earlier cell left on the ranks and that are gone.

Gradients do not come home. They wait on the ranks for the next cell: one may call `backward`, and another `step`. Where
ranks begin anew meanwhile (a cell failed, another strategy, other devices) they are lost, and a step would do nothing,
or less than in one process, silently. Who clears gradients first does not miss them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.intercept import Listeners

SENTENCE = (
    "{} stepped without gradients that an earlier cell had left on the ranks: they do not come home, and are gone "
    "since the ranks began anew (after a cell that failed or was stopped, after a trial, for another strategy, on "
    "other devices). Run that cell's backward again in the cell that steps; where these gradients are not wanted, call "
    "optimizer.zero_grad() first."
)


class LostGradients:
    """Listens in a cell that has tensors whose gradients were lost, until something settles it."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        """id → key of the tensors whose gradients were lost, and which nothing has cleared or missed since"""
        self._said: list[str] = []
        self._listeners = Listeners()

    def begin(self, tensors: Mapping[int, object]) -> None:
        """`tensors`: key → tensor."""
        self._said = []
        self.of = {id(tensor): key for key, tensor in tensors.items()}
        if self.of:
            for path in ("torch.optim.Optimizer.zero_grad", "torch.nn.Module.zero_grad"):
                self._listeners.listen(path, "lost", self._zero_grad)

    def end(self) -> list[str]:
        """After the cell; returns what is to be told."""
        self._listeners.close()
        return self._said

    def stepped(self, optimizer: Optimizer) -> None:
        if self._settle(p for group in optimizer.param_groups for p in group["params"]):
            self._said = [SENTENCE.format(type(optimizer).__name__)]

    def _settle(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether gradients of these were lost."""
        keys = [self.of.pop(id(p), None) for p in tensors]
        return any(key is not None for key in keys)

    def _zero_grad(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            found = old(owner, *args, **kwargs)
            groups = [owner.parameters()] if isinstance(owner, nn.Module) else [g["params"] for g in owner.param_groups]
            self._settle(p for group in groups for p in group)
            return found

        return zero_grad
