"""What a cell asks autograd for while its model is in stages: what cannot be answered is refused, the rest is noted.

`torch.utils.checkpoint` with `use_reentrant=True` begins a backward of its own where it computes again, and finds no
gradients where a graph begins with a stage; without, it gives the same numbers and works there.

Graphs end where a stage begins: whether gradients are to be left in parameters, and which loss a backward starts from,
is known only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners, While
from nbtrain.strategies.kit.call_arguments import kept, listed

AGAIN = (
    "a gradient of a gradient (create_graph=True) cannot be taken under pipeline: each rank has the graph of its own "
    "stage only. Use --strategy ddp for it"
)
BY_NAME = (
    "gradients with respect to a model's own parameters cannot be asked for by name (torch.autograd.grad, or "
    "backward(inputs=...)) under pipeline: each rank has the graph of its own stage only. Call loss.backward() and "
    "read p.grad, or use --strategy ddp"
)


class AutogradRefusals:
    """Refuses what `torch.autograd.backward` and `grad` cannot do for one component, between `on` and `off`."""

    def __init__(self, parameters: Iterable[torch.Tensor], inside: Callable[[], bool]) -> None:
        """`inside`: what runs now is a stage's own backward."""
        self.ids = frozenset(map(id, parameters))
        self.inside = inside
        self.accumulates = True
        """False in `torch.autograd.grad`: no parameter is to get a gradient"""
        self.roots: list[torch.Tensor] = []
        """what the backward that runs now started from"""

    def on(self) -> None:
        self.off()
        _while.on(self)

    def off(self) -> None:
        self.accumulates, self.roots = True, []
        _while.off(self)

    @contextmanager
    def backward(self, roots: list[torch.Tensor], inputs: list[Any]) -> Iterator[None]:
        if self.inside() or self.roots:
            yield
            return
        self._check(inputs)
        self.roots = roots
        try:
            yield
        finally:
            self.roots = []

    @contextmanager
    def grad(self, inputs: list[Any]) -> Iterator[None]:
        if self.inside():
            yield
            return
        self._check(inputs)
        before, self.accumulates = self.accumulates, False
        try:
            yield
        finally:
            self.accumulates = before

    def _check(self, inputs: list[Any]) -> None:
        if any(id(one) in self.ids for one in inputs):
            raise NotSupported(BY_NAME)


def _put(listeners: Listeners) -> None:
    listeners.listen("torch.autograd.backward", "pipeline", _backward)
    listeners.listen("torch.autograd.grad", "pipeline", _grad)
    listeners.listen("torch.utils.checkpoint.checkpoint", "pipeline", _checkpoint)


_while: While[AutogradRefusals] = While(_put)
_open = _while.owners


def _backward(old: Callable[..., Any]) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = kept(tensors)
        roots = [root for root in listed(tensors) if isinstance(root, torch.Tensor)]
        if "inputs" in kwargs:
            kwargs["inputs"] = kept(kwargs["inputs"])
        inputs = listed(kwargs.get("inputs", args[4] if len(args) > 4 else None))
        with ExitStack() as around:
            for asked in _open:
                around.enter_context(asked.backward(roots, inputs))
            return old(tensors, *args, **kwargs)

    return backward


def _grad(old: Callable[..., Any]) -> Callable[..., Any]:
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = kept(inputs)
        given = listed(inputs)
        with ExitStack() as around:
            for asked in _open:
                around.enter_context(asked.grad(given))
            return old(outputs, inputs, *args, **kwargs)

    return grad


def _checkpoint(old: Callable[..., Any]) -> Callable[..., Any]:
    def checkpoint(function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
        return old(function, *args, use_reentrant=False, **kwargs)

    return checkpoint
