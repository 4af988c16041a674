"""What stands in a cell where gradients and the optimizer's state were: DeepSpeed's engine holds them, in pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from nbtrain.compat import tensors
from nbtrain.errors import NotSupported
from nbtrain.strategies.kit.owned_tensors import GradientStandIn, StandIn

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


class HeldGradient(GradientStandIn):
    """Stands in for a gradient. Zeroing it discards the engine's gradient."""

    text = "a gradient that DeepSpeed's engine holds"
    refusal = READ
    zeroed = False
    """somebody has written zeros to it"""

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in MOVES:
            if _stays(func, args, kwargs):
                return args[0]
            raise NotSupported(MOVED)
        if name == "zero_":
            args[0].zeroed = True
        if name == "__set__" and args[0] is args[1]:  # p.grad.data = p.grad.to(…), as `model.to` has it
            return None
        return super().asked(func, name, args, kwargs)


class HeldState(StandIn):
    """Stands in for a tensor of the optimizer's state, in a cell."""

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in MOVES and _stays(func, args, kwargs):
            return args[0]
        raise NotSupported(STATE)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        raise NotSupported(STATE)


class ClosedEntry(dict[str, Any]):
    """What `optimizer.state` has for one parameter in a cell: its content is elsewhere, so nothing can be put there."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupported(STATE)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse


class ClosedState(defaultdict[Any, Any]):
    """`optimizer.state` in a cell. All of it may be thrown away; then the next step begins anew."""

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
    """Whether this `.to(…)`, `.float()` or the like would leave the tensor on its device and in its dtype."""
    with tensors.as_plain_tensors():
        held = args[0]
        empty = torch.empty((0,) * held.dim(), dtype=held.dtype, device=held.device)
        found = func(empty, *args[1:], **kwargs)
        return isinstance(found, torch.Tensor) and (found.dtype, found.device) == (held.dtype, held.device)
