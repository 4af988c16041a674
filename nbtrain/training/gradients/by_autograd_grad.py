"""Tells of gradients by `torch.autograd.grad` that are used without being averaged over the ranks.

Such a gradient is of the rank's own share of a batch. Put into `p.grad` it is averaged before a step. What else is
made of it (fast weights, a penalty, a norm) is of this share: right where each rank works on tasks of its own,
otherwise not what one process has with the whole batch. The two cannot be told apart, so nothing is averaged unasked:
it is said, and `reduce(gradient)` brings it together, which can be differentiated again if the gradient can. The first
ones of a cell are looked at; the ranks compare them as the cell ends (session/report/cell_report.py). Where a
`p.grad` is a sum of them and of the weight (decay by hand, several losses), the factors are compared: if they are the
same everywhere it is right.

No cell fails because of this: what cannot be read is left out.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from nbtrain.compat import autograd_engine, tensors
from nbtrain.strategies.kit.call_arguments import by_name, called_with
from nbtrain.training.setup.components import Components

LOOKS, CALLS, NODES = 4, 64, 64
"""gradients of a cell that are looked at, calls of `functional_call`, and nodes of a graph"""
FEW = 16
"""weights by which it is hard to tell what a gradient was made of"""
SLACK = 4.5e-3
"""what 16 bits may leave over of a sum, by its own size"""
STEP, OFF = 64, 0.27
"""Factors are compared in 64ths: from here, as none that is likely to be written lies where one ends."""
GRADIENT = "nbtrain_gradient"
"""a mark on the nodes of gradients that can be differentiated again"""
LINEAR = (
    autograd_engine.LINEAR
    | autograd_engine.DIVISIONS
    | autograd_engine.COPIES
    | {"CatBackward0", "StackBackward0", "TBackward0"}
)


class AutogradGradients:
    """Follows the gradients that `torch.autograd.grad` gives a rank in a cell. `begin` before each."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.begin(False)

    def begin(self, on: bool) -> None:
        """`on`: whether there are several ranks."""
        self.looks = LOOKS if on else 0
        self._calls = CALLS
        self._again = False
        self.open: list[_GivenGradient] = []
        self._left: list[str] = []
        """sizes of the gradients that were open when the cell ended"""
        self._given: Any = WeakTensorKeyDictionary()
        """tensors that `functional_call` took for weights"""

    def asked(self, inputs: Iterable[Any], found: Any, again: bool) -> None:
        """`torch.autograd.grad` returned these. `again`: with `create_graph=True`."""
        gradients = [autograd_engine.unwrapped(one) for one in found]
        if again:
            self._again = True
            for one in gradients:
                node: Any = getattr(one, "grad_fn", None)
                if node is not None:
                    node.metadata[GRADIENT] = True
        if self.looks:
            with self._looking():
                self._look(inputs, gradients)

    def _look(self, inputs: Iterable[Any], gradients: list[Any]) -> None:
        if not self.looks:  # `_looking` has given up
            return
        weights = self._weights()
        of_weights = [
            (one, gradient)
            for one, gradient in zip(map(autograd_engine.unwrapped, inputs), gradients, strict=False)
            if isinstance(gradient, torch.Tensor)
            and autograd_engine.is_plain(gradient)
            and self._is_weight(one, weights)
        ]
        if of_weights:
            self.looks -= 1
            self.open.append(_GivenGradient(*min(of_weights, key=_ease)))

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Give up where nothing can be read; during the capture of a CUDA graph there are no numbers yet."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.looks, self.open = 0, []
        try:
            yield
        except Exception:  # a mode, a device or a class of tensors that lets nothing be read
            self.looks, self.open = 0, []

    def settle(self) -> None:
        """`p.grad` is about to be averaged: forget gradients that were put there."""
        if all(one.decided for one in self.open):
            return
        with self._looking():
            known = [(one.p(), one.gradient) for one in self.open]
            self.open = [one for one in self.open if one.decided or not one.settled(known)]

    def end(self) -> None:
        """The cell is over: release the gradients that no step has followed."""
        self._left, self.open = [one.size for one in self.open], []
        self._given = WeakTensorKeyDictionary()

    def number(self) -> dict[str, int]:
        """What is compared with the other ranks' after the cell."""
        return {"asked": zlib.crc32(f"{self._left}".encode())} if self._left else {}

    def called(self, old: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.func.functional_call`, whose tensors count as weights."""

        def functional_call(*args: Any, **kwargs: Any) -> Any:
            if self.looks and self._calls:
                self._calls -= 1
                with self._looking():
                    self._take(*called_with(args, kwargs))
            return old(*args, **kwargs)

        return functional_call

    def _take(self, module: Any, weights: Any) -> None:
        own = self._weights()
        if own and not own.isdisjoint(map(id, module.parameters())):
            given = by_name(weights).values()
            self._given.update((one, True) for one in given if isinstance(one, torch.Tensor))

    def reducing(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        """`reduce` that autograd can follow, for gradients with `create_graph=True`."""

        @wraps(reduce)
        def reducing(value: Any, op: str = "mean") -> Any:
            if isinstance(value, torch.Tensor) and (self.open or self._again):
                with self._looking():
                    self.open = [one for one in self.open if not one.within(value)]
                if self._again and op in ("mean", "sum") and torch.is_grad_enabled() and _made_of_gradients(value):
                    return _Reduced.apply(value, op, reduce)
            return reduce(value, op)

        return reducing

    def _weights(self) -> set[int]:
        own = [one for one in self.components.prepared if one.hooks_see_own_gradients]
        return {id(p) for prepared in own for p in prepared.component.parameters()}

    def _is_weight(self, tensor: Any, weights: set[int]) -> bool:
        """Whether it is a weight, or stands for one."""
        if not isinstance(tensor, torch.Tensor):
            return False
        return id(tensor) in weights or tensor in self._given or id(autograd_engine.copied(tensor)) in weights


class _GivenGradient:
    """A gradient that was returned, kept until the next step so that its memory is not used again."""

    def __init__(self, p: torch.Tensor, gradient: torch.Tensor) -> None:
        self.p = ref(p)
        inner = autograd_engine.in_functional_transform()  # what is computed there is not to be used outside
        self.gradient: torch.Tensor | None = gradient if inner else gradient.detach()
        self.shape, self.version = gradient.shape, tensors.version(gradient)
        self.before = _version_of(p.grad) if p.is_leaf else None
        self.size = f"{float(gradient.detach().abs().cpu().double().sum()):.6g}"
        """compared between ranks"""

    @property
    def decided(self) -> bool:
        return self.gradient is None

    def settled(self, known: list[tuple[torch.Tensor | None, torch.Tensor | None]]) -> bool:
        """Whether it was put into `p.grad`, scaled or added to what was there, or was itself reduced
        (`all_reduce(gradient)`). `known`: all open weights and gradients."""
        p, gradient, self.gradient = self.p(), self.gradient, None
        if gradient is None or tensors.version(gradient) != self.version:
            return gradient is not None
        grad = p.grad if p is not None and p.is_leaf else None
        if type(grad) is not torch.Tensor or grad.layout is not torch.strided or grad.shape != self.shape:
            return False
        if self.before is not None and self.before[0] == id(grad):
            return self.before != _version_of(grad)
        if grad.data_ptr() == gradient.data_ptr() or _factors(grad, [gradient]):
            return True
        if grad.numel() >= FEW and p is not None:
            factors = _factors(grad, [*(one for of, one in known if of is p and one is not None), p])
            self.size = f"{factors}" if factors else self.size
        return False

    def within(self, value: torch.Tensor) -> bool:
        """Whether `value` may be this gradient, or this one flattened with others."""
        return value.shape == self.shape or (value.dim() == 1 and value.numel() > self.shape.numel())


class _Reduced(torch.autograd.Function):
    """`reduce` whose backward reduces the gradient in the same way."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, op: str, reduce: Callable[..., Any]) -> Any:
        ctx.how = op, reduce
        return reduce(value, op)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Reduced.apply(gradient, *ctx.how), None, None


def _made_of_gradients(tensor: torch.Tensor) -> bool:
    """Whether it is made of gradients by adding, scaling and concatenating alone, unlike a loss with a penalty."""
    ahead, left = [tensor.grad_fn], NODES
    while ahead and left:
        left -= 1
        node: Any = ahead.pop()
        if node is None:
            continue
        if node.metadata.get(GRADIENT):
            return True
        if autograd_engine.node_name(node) in LINEAR:
            ahead += [behind for behind, _ in node.next_functions]
    return False


def _version_of(grad: torch.Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), tensors.version(grad))


def _ease(both: tuple[torch.Tensor, torch.Tensor]) -> tuple[bool, int]:
    """Sorts small gradients first, but for those too small to tell anything."""
    gradient = both[1]
    return gradient.dim() < 2 or gradient.numel() < FEW, gradient.numel()


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten()


def _factors(total: torch.Tensor, parts: list[torch.Tensor]) -> list[int]:
    """The factors, in 64ths, by which `total` is a sum of `parts`; empty if it is none."""
    wanted, *rows = (_numbers(one.detach().cpu()) for one in (total, *parts))
    given = torch.stack(rows)
    products, along = given @ given.T, given @ wanted
    if not (products.isfinite().all() and along.isfinite().all()):
        return []
    factors = torch.linalg.lstsq(products, along[:, None], driver="gelsd").solution[:, 0]
    if (wanted - factors @ given).norm() > wanted.norm() * SLACK:
        return []
    return [math.floor(one * STEP + OFF) for one in factors.tolist()]
