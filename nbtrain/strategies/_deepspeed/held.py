"""What stands where gradients were that the engine holds: it has their shape, and no content.

Whoever reads it or writes to it, by whatever function of torch, is told so; `is None`, the shape and the like are
answered. To zero it is to throw the engine's gradients away.
"""

from __future__ import annotations

from typing import Any

import torch

from nbtrain.compat import tensors
from nbtrain.errors import NotSupported

READ = (
    "a gradient was looked at or edited (p.grad), and under deepspeed the engine holds the gradients, in pieces: "
    "clip_grad_norm_ returns their norm; for loops that read or edit them take --strategy ddp"
)

ANSWERED = frozenset(
    {
        "shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta",
        "is_quantized", "is_mkldnn", "is_nested", "is_leaf", "requires_grad", "grad_fn", "grad", "names",
        "size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "element_size",
        "is_contiguous", "__hash__", "__len__", "get_device", "is_inference",
        "output_nr", "retains_grad",
        # what a search for memory asks everything it finds
        "untyped_storage", "storage_offset", "data_ptr", "nbytes", "itemsize", "is_pinned", "is_shared",
    } | tensors.ASKS_OF_FORM
)  # fmt: skip


class Held(torch.Tensor):
    """`zeroed`: somebody has written zeros to it."""

    zeroed: bool

    @classmethod
    def of(cls, p: torch.Tensor, dtype: torch.dtype) -> Held:
        """In the parameter's shape, one number in memory."""
        found = torch.zeros((), dtype=dtype, device=p.device).expand(p.shape).as_subclass(cls)
        found.zeroed = False
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__get__":  # of a property
            name = getattr(func.__self__, "__name__", name)
        if name in ANSWERED:
            with tensors.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if name in ("__repr__", "__format__"):
            return f"<a gradient that DeepSpeed's engine holds, {tuple(args[0].shape)}>"
        if name in ("detach_", "requires_grad_"):  # on the way to being zeroed
            return args[0]
        if name == "zero_":
            args[0].zeroed = True
            return args[0]
        raise NotSupported(READ)
