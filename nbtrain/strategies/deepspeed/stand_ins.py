"""What stands in a cell where gradients and the optimizer's state were: DeepSpeed's engine holds them, in pieces."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from nbtrain.base.errors import NotSupported
from nbtrain.compat import tensors
from nbtrain.strategies.kit.owned_tensors import MOVES, GradientStandIn, StandIn, stays

READ = (
    "a gradient was looked at or edited (p.grad), and under deepspeed the engine holds the gradients, in pieces: write "
    "`with whole(model, gradients=True): …` around it, between loss.backward() and optimizer.step(); clip_grad_norm_ "
    "returns their norm"
)

MOVED = (
    "a model's device or dtype was changed in the cell (model.to(…), .cpu(), .float(), .double()), and DeepSpeed's "
    "engine was set up for what it was: change it in a cell that is not distributed, before this one, or take "
    "--strategy ddp"
)

STATE = (
    "the optimizer's state was read or edited in the cell (optimizer.state[p][…]), and under deepspeed it is in "
    "pieces: write `with whole(optimizer): …` around it; optimizer.state_dict() gives the whole"
)

KEPT = (
    "a state dict of the optimizer that was kept over a step, or over an edit of another one: in one process its "
    "tensors go on with the optimizer, and under deepspeed they cannot. Write `copy.deepcopy(optimizer.state_dict())` "
    "to keep a state, or call state_dict() where it is used"
)

OUTDATED = (
    "a tensor of a model.state_dict() from before a step: in one process it is the model's own and goes on with it, "
    "under deepspeed's stage 3 it is a copy. Write `copy.deepcopy(model.state_dict())` to keep the weights, or call "
    "state_dict() where it is used"
)

_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""parameter → what has stood for its gradient"""


class HeldGradient(GradientStandIn):
    """Stands in for a gradient. Zeroing it discards the engine's gradient."""

    text = "a gradient that DeepSpeed's engine holds"
    refusal = READ
    zeroed = False
    """somebody has written zeros to it"""

    @classmethod
    def made_once(cls, p: torch.Tensor, dtype: torch.dtype) -> HeldGradient:
        """The same for the next engine: who compares gradients finds the one that was there."""
        gradient: HeldGradient | None = _made.get(p)
        if gradient is None or (gradient.dtype, gradient.shape, gradient.device) != (dtype, p.shape, p.device):
            gradient = _made[p] = cls.of(p, dtype)
        return gradient

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in MOVES and not stays(func, args, kwargs):
            raise NotSupported(MOVED)
        if name == "zero_":
            args[0].zeroed = True
        if name == tensors.ZERO_MANY:
            return [gradient.zero_() for gradient in args[0]]
        return super().asked(func, name, args, kwargs)


class HeldState(StandIn):
    """Stands in for a tensor of the optimizer's state, in a cell."""

    refusal = STATE

    @classmethod
    def asked(cls, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in MOVES and stays(func, args, kwargs):
            return args[0]
        raise NotSupported(cls.refusal)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        raise NotSupported(self.refusal)


class KeptState(HeldState):
    """What is left of an optimizer's state dict after a step."""

    refusal = KEPT


class Outdated(HeldState):
    """What is left of a model's state dict after a step (stage 3)."""

    refusal = OUTDATED


class ClosedState(defaultdict[Any, Any]):
    """`optimizer.state` in a cell, and what it has for one parameter: the content is elsewhere, so nothing can be put
    there or taken away."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = (defaultdict, (dict,)) if self.default_factory else (dict, ())  # of all parameters, or of one
        return *made, None, None, iter(self.items())

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise NotSupported(STATE)

    __missing__ = __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse
