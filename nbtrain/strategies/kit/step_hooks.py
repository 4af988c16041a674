"""Hooks on the steps of optimizers, which are the last before a step, and the first after it: those of a user read and
write as the loop around the step does."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbtrain.compat.optimizers import call_first_after_step, call_last_before_step, calls_hooks


class StepHooks:
    """Hung on optimizers while a cell runs. They stay in a pause, which a hook of the user's may make, while torch goes
    through these very tables; what is loaded in a pause is whole."""

    def __init__(
        self,
        before: Callable[[Optimizer, Any, Any], Any],
        after: Callable[[Optimizer, Any, Any], None],
        loaded: Callable[[Optimizer], None],
    ) -> None:
        """`loaded`: called after a state dict was."""
        self.before, self.after, self.loaded = before, after, loaded
        self._handles: list[Any] = []
        self._loading: list[Any] = []
        self._hung: WeakKeyDictionary[Optimizer, tuple[Any, Any]] = WeakKeyDictionary()

    def hang(self, optimizers: Iterable[Optimizer]) -> None:
        """Also where a pause has ended."""
        if not self._handles:
            self._handles.append(register_optimizer_step_pre_hook(self._arrange))
        for optimizer in filter(calls_hooks, optimizers):
            self._loading.append(optimizer.register_load_state_dict_post_hook(self.loaded))
            if optimizer not in self._hung:
                self._hung[optimizer] = (
                    optimizer.register_step_pre_hook(self.before),
                    optimizer.register_step_post_hook(self.after),
                )
                self._handles += self._hung[optimizer]

    def leave(self, pause: bool) -> None:
        while self._loading:
            self._loading.pop().remove()
        while self._handles and not pause:
            self._handles.pop().remove()
        if not pause:
            self._hung.clear()

    def _arrange(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if hooks := self._hung.get(optimizer):
            before, after = hooks
            call_last_before_step(optimizer, before)
            call_first_after_step(optimizer, after)
