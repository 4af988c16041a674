"""What stands where gradients were that the engine holds: it has their shape, and no content.

Whoever reads it or writes to it, by whatever function of torch, is told so; `is None`, the shape and the like are
answered. To zero it is to throw the engine's gradients away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from nbtrain.compat import tensors
from nbtrain.errors import NotSupported

READ = (
    "a gradient was looked at or edited (p.grad), and under deepspeed the engine holds the gradients, in pieces: "
    "clip_grad_norm_ returns their norm; for loops that read or edit them take --strategy ddp"
)

MOVED = (
    "a model's device or dtype was changed in the cell (model.to(…), .cpu(), .float(), .double()), and DeepSpeed's "
    "engine was set up for what it was: change it in a cell that is not distributed, before this one, or take "
    "--strategy ddp"
)

STATE = (
    "the optimizer's state was read or edited in the cell (optimizer.state[p][…]), and under deepspeed it is in "
    "pieces: optimizer.state_dict() gives the whole; read or edit the state in a cell that is not distributed, or take "
    "--strategy ddp"
)

MOVES = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type"})

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


class StandIn(torch.Tensor):
    """Asked for its form it answers; everything else is the class's own affair."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__get__":  # of a property
            name = getattr(func.__self__, "__name__", name)
        if name in ANSWERED:
            with tensors.as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if name in MOVES and _stays(func, args, kwargs or {}):
            return args[0]
        return cls.asked(name, args)

    @classmethod
    def asked(cls, name: str, args: Any) -> Any:
        raise NotImplementedError


class Held(StandIn):
    """Of a gradient. `zeroed`: somebody has written zeros to it."""

    zeroed: bool

    @classmethod
    def of(cls, p: torch.Tensor, dtype: torch.dtype) -> Held:
        """In the parameter's shape, one number in memory."""
        found = torch.zeros((), dtype=dtype, device=p.device).expand(p.shape).as_subclass(cls)
        found.zeroed = False
        return found

    @classmethod
    def asked(cls, name: str, args: Any) -> Any:
        if name in ("__repr__", "__format__"):
            return f"<a gradient that DeepSpeed's engine holds, {tuple(args[0].shape)}>"
        if name in ("detach_", "requires_grad_"):  # on the way to being zeroed
            return args[0]
        if name == "zero_":
            args[0].zeroed = True
            return args[0]
        if name == "__set__" and args[0] is args[1]:  # p.grad.data = p.grad.to(…), as `model.to` has it
            return None
        raise NotSupported(MOVED if name in MOVES else READ)


class HeldState(StandIn):
    """Of a tensor of the optimizer's state, in a cell."""

    @classmethod
    def asked(cls, name: str, args: Any) -> Any:
        raise NotSupported(STATE)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        raise NotSupported(STATE)


class ClosedEntry(dict[str, Any]):
    """What the optimizer keeps for one parameter, in a cell: its content is elsewhere, so nothing is put there."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupported(STATE)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


class ClosedState(defaultdict[Any, Any]):
    """`optimizer.state` in a cell. All of it may be thrown away: then the next step begins anew."""

    emptied = False

    def __init__(self, state: Mapping[Any, Any]) -> None:
        super().__init__(ClosedEntry, {p: ClosedEntry(entry) for p, entry in state.items()})

    def __setitem__(self, p: Any, entry: Any) -> None:
        if type(entry) is not ClosedEntry or entry:  # else one that was asked for
            raise NotSupported(STATE)
        super().__setitem__(p, entry)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def clear(self) -> None:
        super().clear()
        self.emptied = True

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupported(STATE)

    __delitem__ = __ior__ = update = setdefault = pop = popitem = _refuse


def _stays(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it would stay on its device and in its dtype."""
    with tensors.as_plain_tensors():
        held = args[0]
        empty = torch.empty((0,) * held.dim(), dtype=held.dtype, device=held.device)
        found = func(empty, *args[1:], **kwargs)
        return isinstance(found, torch.Tensor) and (found.dtype, found.device) == (held.dtype, held.device)
