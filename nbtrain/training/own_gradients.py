"""What `torch.autograd.grad` gives by weights, where ranks average gradients: it is of a rank's own share of a batch.

Put into `p.grad` it is averaged before a step. What else is made of it (fast weights, a penalty, a norm) is of this
share: right where each rank works on tasks of its own, otherwise not what one process has with the whole batch. The
two cannot be told apart, so nothing is averaged unasked: it is said, and `reduce(gradient)` brings it together, which
can be differentiated again if the gradient can. The first ones of a cell are looked at; that they differ between ranks
shows as the cell ends (session/compared.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nbtrain.compat import engine, tensors
from nbtrain.training.prepare import Workshop

LOOKS, NODES = 4, 64
"""calls of a cell that are looked at, and nodes of a graph"""
GRADIENT = "nbtrain_gradient"
"""a mark on the nodes of gradients that can be differentiated again"""
LINEAR = engine.LINEAR | engine.DIVISIONS | engine.COPIES | {"CatBackward0", "StackBackward0", "TBackward0"}


class OwnGradients:
    """Of one rank. `begin` before each cell."""

    def __init__(self, workshop: Workshop) -> None:
        self.workshop = workshop
        self.begin(False)

    def begin(self, on: bool) -> None:
        """`on`: there are several ranks."""
        self.looks = LOOKS if on else 0
        self._again = False
        self.open: list[_Asked] = []
        self._left: list[str] = []
        """sizes of those that were open as the cell ended"""
        self._number = 0
        self._given: Any = WeakTensorKeyDictionary()
        """what `functional_call` took in the place of weights"""

    def asked(self, inputs: Iterable[Any], found: Any, again: bool) -> None:
        """`torch.autograd.grad` gave these. `again`: to be differentiated once more."""
        gradients = [engine.unwrapped(one) for one in found]
        if again:
            self._again = True
            for one in gradients:
                node: Any = getattr(one, "grad_fn", None)
                if node is not None:
                    node.metadata[GRADIENT] = True
        if not self.looks:
            return
        weights = self._weights()
        of_weights = [
            (one, gradient)
            for one, gradient in zip(map(engine.unwrapped, inputs), gradients, strict=False)
            if isinstance(gradient, torch.Tensor) and engine.is_plain(gradient) and self._is_weight(one, weights)
        ]
        if of_weights:
            self.looks -= 1
            self.open.append(_Asked(*min(of_weights, key=lambda both: (both[1].dim() < 2, both[1].numel()))))

    def settle(self) -> None:
        """What is in `p.grad` is about to be averaged, for a step or to be clipped."""
        self.open = [one for one in self.open if one.decided or not one.settled()]

    def end(self) -> None:
        """The cell is over. Gradients that no step has followed are held no longer."""
        self._left, self.open = [one.size for one in self.open], []

    def number(self) -> dict[str, int]:
        """To be compared with the other ranks', after the cell."""
        return {"asked": zlib.crc32(f"{self._left}".encode())} if self._left else {}

    def called(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.func.functional_call`."""

        def functional_call(module: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
            if self.looks and any(id(p) in self._weights() for p in module.parameters()):
                for some in weights if isinstance(weights, tuple | list) else (weights,):
                    self._given.update((one, True) for one in some.values() if isinstance(one, torch.Tensor))
            return old(module, weights, *args, **kwargs)

        return functional_call

    def reducing(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """`reduce`, which autograd follows where it brings together gradients that can be differentiated again."""

        @wraps(reduce)
        def reducing(value: Any, op: str = "mean") -> Any:
            if isinstance(value, torch.Tensor) and (self.open or self._again):
                self.open = [one for one in self.open if not one.within(value)]
                if self._again and op in ("mean", "sum") and torch.is_grad_enabled() and _made_of_gradients(value):
                    return _Reduced.apply(value, op, reduce)
            return reduce(value, op)

        return reducing

    def _weights(self) -> set[int]:
        own = [one for one in self.workshop.prepared if one.hooks_see_own_gradients]
        return {id(p) for prepared in own for p in prepared.component.parameters()}

    def _is_weight(self, tensor: Any, weights: set[int]) -> bool:
        """Or what stands for one."""
        if not isinstance(tensor, torch.Tensor):
            return False
        return id(tensor) in weights or tensor in self._given or id(engine.copied(tensor)) in weights


class _Asked:
    """A gradient that was given. It is held until the next step: its memory would be another's."""

    def __init__(self, p: torch.Tensor, gradient: torch.Tensor) -> None:
        self.p = ref(p)
        inner = engine.in_functional_transform()  # what is computed there is not to be used outside
        self.gradient: torch.Tensor | None = gradient if inner else gradient.detach()
        self.shape, self.version = gradient.shape, tensors.version(gradient)
        self.before = _version_of(p.grad) if p.is_leaf else None
        self.size = f"{float(gradient.detach().double().abs().sum()):.6g}"

    @property
    def decided(self) -> bool:
        return self.gradient is None

    def settled(self) -> bool:
        """It was put into `p.grad`, scaled or added to what was there, or has itself been brought together
        (`all_reduce(gradient)`)."""
        p, gradient, self.gradient = self.p(), self.gradient, None
        if gradient is None or tensors.version(gradient) != self.version:
            return gradient is not None
        grad = p.grad if p is not None and p.is_leaf else None
        if type(grad) is not torch.Tensor or grad.layout is not torch.strided or grad.shape != self.shape:
            return False
        if self.before is not None and self.before[0] == id(grad):
            return self.before != _version_of(grad)
        return grad.data_ptr() == gradient.data_ptr() or _parallel(grad.detach(), gradient.detach())

    def within(self, value: torch.Tensor) -> bool:
        """It is that, or flattened with others."""
        return value.shape == self.shape or (value.dim() == 1 and value.numel() > self.shape.numel())


class _Reduced(torch.autograd.Function):
    """A loss counts on each rank for its share: so does what comes back of it, brought together likewise."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, op: str, reduce: Callable[..., Any]) -> Any:  # type: ignore[override]
        ctx.how = op, reduce
        return reduce(value, op)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Reduced.apply(gradient, *ctx.how), None, None


def _made_of_gradients(tensor: torch.Tensor) -> bool:
    """By adding, scaling and putting together alone: not a loss that has a penalty on them."""
    ahead, left = [tensor.grad_fn], NODES
    while ahead and left:
        left -= 1
        node: Any = ahead.pop()
        if node is None:
            continue
        if node.metadata.get(GRADIENT):
            return True
        if engine.node_name(node) in LINEAR:
            ahead += [behind for behind, _ in node.next_functions]
    return False


def _version_of(grad: torch.Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), tensors.version(grad))


def _parallel(one: torch.Tensor, other: torch.Tensor) -> bool:
    along, across = (one * other).sum(), one.norm() * other.norm()
    return bool(along.abs() >= across * (1 - 1e-5))
