"""What stands where a gradient was that only its owner has: it has its shape, and no content.

Whoever reads it or writes to it is told so; `is None`, the shape and the like are answered, and it can be zeroed.
"""

from __future__ import annotations

from typing import Any

import torch

from nbtrain.compat import tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.owned_tensors import ANSWERED

READ = (
    "a gradient was looked at or edited (p.grad, or by a GradScaler of one's own), and under sharded one rank has it "
    "and the others have not: clip_grad_norm_ returns their norm, and --precision 16-mixed scales losses; for loops "
    "that read or edit gradients take --strategy zero1, or --strategy ddp"
)

ZEROED = frozenset({"zero_", "detach_", "requires_grad_"})


class Elsewhere(torch.Tensor):
    @classmethod
    def of(cls, p: torch.Tensor) -> Elsewhere:
        return torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__get__":  # of a property
            name = getattr(func.__self__, "__name__", name)
        if name in ZEROED:
            return args[0]
        if name == tensors.ZERO_MANY:
            with tensors.as_plain_tensors():
                return func([one for one in args[0] if not isinstance(one, cls)])
        if name in ("__repr__", "__format__"):
            return f"<a gradient that another rank has, {tuple(args[0].shape)}>"
        if name in ANSWERED:
            with tensors.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        raise NotSupported(READ)
