"""The user's optimizer while a cell runs: its `step()` is one of the engine's, and its `zero_grad()` sets to None."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.optim import Optimizer

if TYPE_CHECKING:
    from nbtrain.strategies._deepspeed.gradients import Gradients


class Handle:
    """`put_on` and `take_off` with each cell. Holds the optimizer, and not those whose step it is."""

    def __init__(self, user: Optimizer, gradients: Gradients) -> None:
        self.user, self._gradients = user, ref(gradients)
        self._before: dict[str, Any] = {}

    def put_on(self) -> None:
        own = vars(self.user)
        self._before = {name: own.get(name) for name in ("step", "zero_grad")}
        step: Any = types.MethodType(self._hooked(), self.user)
        vars(step.__func__)["_wrapped_by_lr_sched"] = True  # schedulers look for it, to warn of steps they cannot see
        own["step"] = step
        own["zero_grad"] = types.MethodType(_zero_grad, self.user)

    def take_off(self) -> None:
        own = vars(self.user)
        for name, before in self._before.items():
            mine = own.get(name)
            function = getattr(mine, "__func__", None)
            if function is None or not (function is _zero_grad or getattr(function, "nbtrain_of", None) is self):
                continue  # a scheduler that the cell made has put its wrapper around it
            if before is None:
                del own[name]
            else:
                own[name] = before

    def _hooked(self) -> Callable[..., Any]:
        """With torch's hooks around it, which see one step of the user's optimizer."""

        def user_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._user_step(optimizer, *args, **kwargs)

        wrapped: Any = Optimizer.profile_hook_step(user_step)
        wrapped.nbtrain_of = self
        return wrapped  # type: ignore[no-any-return]

    def _user_step(self, optimizer: Optimizer, closure: Any = None) -> Any:
        gradients = self._gradients()
        if gradients is None or not gradients.owner.entered:  # a wrapper of a cell that is over still leads here
            return type(optimizer).step(optimizer, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer._opt_called = True  # type: ignore[attr-defined]
        gradients.step()
        return loss


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Stand-ins cannot be zeroed; None means the same to the engine. Looked up now: `--accumulate` keeps it quiet."""
    type(optimizer).zero_grad(optimizer, True)
