"""The gradient of a parameter that another rank has: it is there, and cannot be read here.

Loops ask whether there is one (`p.grad is not None`), and change all of them alike (`p.grad.mul_(2)`): the owner does
it, here it does nothing. Whoever reads it is told what to write instead.
"""

from __future__ import annotations

from typing import Any

import torch

from nbtrain.compat import dtensor, tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.owned import stand_in

READ = (
    "the gradient of a parameter was read that is on another rank: under pipeline each rank has the gradients of its "
    "own stage. clip_grad_norm_ knows the norm of them all, and p.grad.mul_(...) or .zero_() change them where they "
    "are; else use --strategy ddp"
)
PLAIN = frozenset({"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size"})
"""What is known of it."""


class Elsewhere(torch.Tensor):
    """In the place of `p.grad`."""

    @classmethod
    def of(cls, p: torch.Tensor) -> Elsewhere:
        found: Elsewhere = tensors.as_subclass_of(cls, stand_in(p.detach()))
        # What code sees that looks for numbers which are not finite, in the part of a gradient that a rank has.
        dtensor.pose_with_local(found, torch.zeros(1, dtype=p.dtype, device=p.device))
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in PLAIN:
            with tensors.as_plain_tensors():
                return func(*args, **kwargs)
        changes = name.endswith("_") and not name.startswith("__")
        if changes and name.startswith("_") and args and isinstance(args[0], (list, tuple)):  # of many at once
            here = [not isinstance(one, Elsewhere) for one in args[0]]
            args = [_only(arg, here) for arg in args]
            return func(*args, **kwargs) if args[0] else None
        if (changes and args and isinstance(args[0], Elsewhere)) or name == "__set__":
            return args[0]
        raise NotSupported(READ)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<a gradient of the shape {tuple(self.shape)} on another rank>"


def _only(arg: Any, here: list[bool]) -> Any:
    if isinstance(arg, (list, tuple)) and len(arg) == len(here):
        return [one for one, is_here in zip(arg, here, strict=True) if is_here]
    return arg
