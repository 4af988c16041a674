"""The user's optimizer while a cell runs: its `step()` is one of the engine's, and its `zero_grad()` sets to None."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.optim import Optimizer

from nbtrain.compat import optimizers

if TYPE_CHECKING:
    from nbtrain.strategies.deepspeed.gradients import Gradients


class OptimizerHandle:
    """`put_on` and `take_off` with each cell. Holds the optimizer, and not those whose step it is."""

    def __init__(self, user: Optimizer, gradients: Gradients) -> None:
        self.user, self.gradients = user, ref(gradients)
        self.before: dict[str, Any] = {}

    def put_on(self) -> None:
        own = vars(self.user)
        self.before["zero_grad"] = own.get("zero_grad")
        own["zero_grad"] = types.MethodType(_zero_grad, self.user)
        older = _behind(own.get("step"))
        if older is not None:  # the cell has put something around it, which is to go on leading to the engine
            older.gradients = self.gradients
            return
        self.before["step"] = own.get("step")
        step: Any = types.MethodType(self._hooked(), self.user)
        vars(step.__func__)[optimizers.MARK] = True
        own["step"] = step

    def take_off(self) -> None:
        own = vars(self.user)
        if getattr(own.get("zero_grad"), "__func__", None) is _zero_grad:
            _restore(own, "zero_grad", self.before)
        function = getattr(own.get("step"), "__func__", None)  # else something of the cell's is around it
        whose = getattr(function, "nbtrain_of", None)
        if isinstance(whose, OptimizerHandle):
            _restore(own, "step", whose.before)

    def _hooked(self) -> Callable[..., Any]:
        """With torch's hooks around it, which see one step of the user's optimizer."""

        def user_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._user_step(optimizer, *args, **kwargs)

        wrapped: Any = Optimizer.profile_hook_step(user_step)
        wrapped.nbtrain_of = self
        return wrapped  # type: ignore[no-any-return]

    def _user_step(self, optimizer: Optimizer, closure: Any = None) -> Any:
        gradients = self.gradients()
        if gradients is None or not gradients.owner.entered:  # a wrapper of a cell that is over still leads here
            return type(optimizer).step(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizers.say_stepped(optimizer)
        gradients.step()
        return loss


def _restore(own: dict[str, Any], name: str, before: dict[str, Any]) -> None:
    if before.get(name) is None:
        del own[name]
    else:
        own[name] = before[name]


def _behind(step: Any) -> OptimizerHandle | None:
    """Whose step is called in the end; `--accumulate` says in `before` what it has been put around."""
    while step is not None:
        function = getattr(step, "__func__", step)
        whose = getattr(function, "nbtrain_of", None)
        if isinstance(whose, OptimizerHandle):
            return whose
        step = getattr(function, "before", None) or getattr(function, "__wrapped__", None)
    return None


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Stand-ins cannot be zeroed; None means the same to the engine. Looked up now: `--accumulate` keeps it quiet."""
    type(optimizer).zero_grad(optimizer, True)
