"""Tells of gradients by `torch.autograd.grad` that are used without being averaged over the ranks.

Such a gradient is of the rank's own share of a batch. Put into `p.grad` it is averaged before a step. What else is
made of it (fast weights, a penalty, a norm) is of this share: right where each rank works on tasks of its own,
otherwise not what one process has with the whole batch. The two cannot be told apart, so nothing is averaged unasked:
it is said, and `reduce(gradient)` brings it together, which can be differentiated again if the gradient can.

The first ones of a cell are looked at: what all ranks have the same (a weight, a copy of one), with a gradient that is
not the same, is told as the cell ends (notebook/report/cell_report.py). Whether a loop has put one into `p.grad` is
known by who has written it. Of what it has put there, `g`, `a + 0.5 * b` or `g / g.norm()`, the factors are compared:
a mean of multiples is the multiple of the mean where they are the same on all ranks.

No cell fails because of this: what cannot be read is left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from typing import Any
from weakref import ref

import torch

from nbtrain.compat import autograd_engine, tensors
from nbtrain.compat.dtensor import is_divided
from nbtrain.worker.ranks.collectives import Reduced

LOOKS = 4
"""gradients of a cell that are looked at"""


class AutogradGradients:
    """Follows the gradients that `torch.autograd.grad` gives a rank in a cell. `begin` before each."""

    def __init__(self) -> None:
        self.begin(False)

    def begin(self, on: bool) -> None:
        """`on`: whether there are several ranks."""
        self.looks = LOOKS if on else 0
        self._again: set[torch.Size] = set()
        """of those that can be differentiated"""
        self.open: list[_GivenGradient] = []
        self._left: list[tuple[str, str]] = []
        """sizes of a tensor and its gradient, of those that were open when the cell ended; or that a gradient was put
        into `p.grad`, and the factors of it"""

    def asked(self, inputs: Iterable[Any], gradients: Any, again: bool) -> None:
        """`torch.autograd.grad` returned these. `again`: with `create_graph=True`."""
        gradients = list(map(autograd_engine.unwrapped, gradients))
        if again:
            self._again |= {gradient.shape for gradient in gradients if isinstance(gradient, torch.Tensor)}
        if self.looks:
            try:
                with tensors.as_plain_tensors():  # what a strategy says of weights that a cell reads is not meant here
                    self._look(map(autograd_engine.unwrapped, inputs), gradients)
            except Exception:  # a mode, a device or a class of tensors that lets nothing be read
                self.looks, self.open = 0, []

    def _look(self, inputs: Iterable[Any], gradients: Iterable[Any]) -> None:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # there are no numbers yet
            self.looks, self.open = 0, []
            return
        given = [  # a matrix rather than a bias, and a small one rather than a large one
            (gradient.dim() < 2, gradient.numel(), number, tensor, gradient)
            for number, (tensor, gradient) in enumerate(zip(inputs, gradients, strict=False))
            if isinstance(gradient, torch.Tensor) and autograd_engine.is_plain(gradient) and not is_divided(tensor)
        ]
        if given:
            self.looks -= 1
            self.open.append(_GivenGradient(*min(given)[3:]))

    def backward_ended(self) -> None:
        """What `p.grad` is now a backward has put there."""
        for asked in self.open:
            asked.before = asked.stand()

    def settle(self) -> None:
        """`p.grad` is about to be averaged: forget gradients that were put there."""
        put: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for asked in self.open[:]:
            gradient, p = asked.gradient, asked.p()
            if gradient is not None and asked.settled():
                self.open.remove(asked)
                if p is not None and asked.put_there(gradient):
                    put.setdefault(id(p), []).append((p, gradient))
        for pairs in put.values():
            with suppress(Exception):  # a hint breaks no cell
                self._left.append(("put", _factors(pairs[0][0], [gradient for _, gradient in pairs])))

    def end(self) -> None:
        """The cell is over: release the gradients that no step has followed."""
        self._left += [asked.sizes for asked in self.open if float(asked.sizes[0])]  # zeros say nothing
        self.open = []

    def numbers(self) -> dict[str, int]:
        """What is compared with the other ranks' after the cell."""
        numbers = {}
        for number, sizes in enumerate(self._left):
            numbers[f"asked {number} by"], numbers[f"asked {number}"] = (zlib.crc32(size.encode()) for size in sizes)
        return numbers

    def reducing(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """`reduce` that autograd can follow, of what has the form of gradients with `create_graph=True`."""

        @wraps(reduce)
        def reducing(value: Any, op: str = "mean") -> Any:
            if isinstance(value, torch.Tensor) and (self.open or self._again):
                self.open = [asked for asked in self.open if not asked.within(value)]
                gradient = value.shape in self._again or value.dim() == 1  # itself, or flattened with others
                if self._again and gradient and op in ("mean", "sum") and value.requires_grad:
                    return Reduced.apply(value, op, reduce)
            return reduce(value, op)

        return reducing


class _GivenGradient:
    """A gradient that was returned, until the next step."""

    def __init__(self, p: torch.Tensor, gradient: torch.Tensor) -> None:
        self.p, self.shape, self.version = ref(p), gradient.shape, tensors.version(gradient)
        inner = autograd_engine.in_functional_transform()  # what is computed there is not to be used outside
        self.gradient: torch.Tensor | None = gradient if inner else gradient.detach()
        self.before = self.stand()
        self.sizes = _size(p), _size(gradient)

    def stand(self) -> tuple[int, int] | None:
        p = self.p()
        grad = p.grad if p is not None and p.is_leaf else None
        return None if grad is None else (id(grad), tensors.version(grad))

    @property
    def decided(self) -> bool:
        return self.gradient is None

    def settled(self) -> bool:
        """Whether the loop has written to `p.grad` since, or has itself reduced this one (`all_reduce(gradient)`)."""
        gradient, self.gradient = self.gradient, None
        assert gradient is not None
        return tensors.version(gradient) != self.version or self.stand() not in (None, self.before)

    def put_there(self, gradient: torch.Tensor) -> bool:
        """Whether `p.grad` is made of it alone, as of now."""
        return self.before is None and self.stand() is not None and tensors.version(gradient) == self.version

    def within(self, value: torch.Tensor) -> bool:
        """Whether `value` may be this gradient, or this one flattened with others."""
        return value.shape == self.shape or (value.dim() == 1 and value.numel() > self.shape.numel())


def _factors(p: torch.Tensor, gradients: list[torch.Tensor]) -> str:
    """Of which multiples of these, and of `p` (weight decay), `p.grad` is the sum; if it is none, its size."""
    assert p.grad is not None
    own, *given = (tensor.detach().double().cpu().flatten() for tensor in (p.grad, *gradients, p))
    columns = torch.stack(given, 1)
    factors = torch.linalg.lstsq(columns, own[:, None], driver="gelsd").solution
    if float((columns @ factors)[:, 0].dist(own)) > 1e-3 * float(own.norm()):
        return _size(own)
    least = 1e-3 * float(factors.abs().max())
    # What loops multiply with, 0.5 or 0.125, is not to lie where it may be rounded up or down.
    return " ".join(f"{1.017 * float(factor) if abs(factor) > least else 0:.2g}" for factor in factors)


def _size(tensor: torch.Tensor) -> str:
    return f"{float(tensor.detach().abs().cpu().double().sum()):.6g}"
