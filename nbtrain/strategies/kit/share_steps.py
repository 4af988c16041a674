"""Steps of an optimizer of which each rank takes its share.

During a step the optimizer's groups hold the rank's own parameters, outside of it all of them. So the user's own
optimizer does the work, whatever class it has; schedulers, clipping, closures and hooks on its step find the groups
that they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbtrain.compat import tensors
from nbtrain.compat.optimizers import call_first_after_step, call_last_before_step
from nbtrain.strategies.kit.optimizer_shares import OptimizerShares

METHODS = ("zero_grad", "state_dict", "load_state_dict", "add_param_group")


class ShareSteps:
    """Lets each rank step its share. `send(optimizer)`: called after a step, gives the owners' parameters to all ranks.
    `ready(optimizer)`: called before it. Both are collective."""

    def __init__(
        self,
        state: OptimizerShares,
        send: Callable[[Optimizer], None],
        ready: Callable[[Optimizer], None] = lambda _: None,
    ) -> None:
        self.state, self.send, self.ready = state, send, ready
        self._trimmed: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        """groups that hold less than they should, and what they should hold"""
        self._covered: list[tuple[Optimizer, str]] = []
        """methods that see whole groups meanwhile"""
        self._handles: list[Any] = []
        self._hooks: WeakKeyDictionary[Optimizer, tuple[Any, Any]] = WeakKeyDictionary()
        """of each optimizer: they have to be the last before a step, and the first after it"""
        self._changed = False
        self._plain: Any = None
        """the context in which an owner's state is of ordinary tensors: that of a step"""

    def enter(self, optimizers: Iterable[Optimizer]) -> None:
        self._handles.append(register_optimizer_step_pre_hook(self._arrange))
        optimizers = list(optimizers)
        self.state.enter(optimizers)
        for optimizer in optimizers:
            before = optimizer.register_step_pre_hook(self._trim)
            after = optimizer.register_step_post_hook(self._stepped)
            self._hooks[optimizer] = before, after
            loaded = optimizer.register_load_state_dict_post_hook(self.state.renew)
            self._handles += [before, after, loaded]

    def leave(self) -> None:
        self.restore()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._hooks.clear()
        self.state.leave()

    def restore(self) -> None:
        """Groups are complete. Called before a backward and a clipping, too: a step may have raised, and the loop gone
        on."""
        if self._plain is not None:
            self._plain.__exit__(None, None, None)
            self._plain = None
        while self._trimmed:
            group, parameters = self._trimmed.pop()
            group["params"] = parameters
        while self._covered:
            optimizer, name = self._covered.pop()
            vars(optimizer).pop(name, None)

    def _arrange(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if hooks := self._hooks.get(optimizer):
            before, after = hooks
            call_last_before_step(optimizer, before)
            call_first_after_step(optimizer, after)

    def _trim(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self.restore()
        self.ready(optimizer)
        self.state.put_away()
        if self.state.edited(optimizer):
            self.state.renew(optimizer)
        self._changed = self.state.stepping(optimizer)
        self._keep_mine(optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            return None

        whole = self._on_whole(optimizer, closure)
        return ((args[0], whole, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": whole})

    def _keep_mine(self, optimizer: Optimizer) -> None:
        self._plain = tensors.as_plain_tensors()
        self._plain.__enter__()
        mine = (self.state.rank, None)
        for group in optimizer.param_groups:
            self._trimmed.append((group, group["params"]))
            group["params"] = [p for p in group["params"] if self.state.owner(p) in mine]
        for name in METHODS:  # a step may raise, and the loop catch it: no hook of torch's says so
            if name not in vars(optimizer):
                vars(optimizer)[name] = self._on_whole(optimizer, getattr(optimizer, name))
                self._covered.append((optimizer, name))

    def _on_whole(self, optimizer: Optimizer, function: Callable[..., Any]) -> Callable[..., Any]:
        def whole(*args: Any, **kwargs: Any) -> Any:
            self.restore()
            try:
                return function(*args, **kwargs)
            finally:
                self._keep_mine(optimizer)

        return whole

    @torch.no_grad()
    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.restore()
        self.send(optimizer)
        self.state.stepped(optimizer, self._changed)
