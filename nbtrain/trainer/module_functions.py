"""What a module calls as `self.…` while a Trainer runs it, beside `self.log`."""

from __future__ import annotations

import builtins
from typing import Any

import torch
from torch import nn

from nbtrain.compat.pytree import tree_map_only
from nbtrain.trainer.metrics import Metrics


class ModuleFunctions(Metrics):
    """The part of a Trainer that steps by hand speak to."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizers: list[Any] = []
        self.schedules: list[Any] = []
        self._toggled: list[Any] = []

    def module_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers

    def module_schedulers(self) -> Any:
        found = [one.scheduler for one in self.schedules]
        return found[0] if len(found) == 1 else found or None

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        held = self.parameters_of(optimizer)
        if gradient_clip_val:
            clip = nn.utils.clip_grad_value_ if gradient_clip_algorithm == "value" else nn.utils.clip_grad_norm_
            clip(held, gradient_clip_val)

    def toggle_optimizer(self, optimizer: Any, optimizer_idx: int = 0) -> None:
        """Until `untoggle_optimizer` a backward leaves nothing for the parameters of other optimizers."""
        self.untoggle_optimizer()
        mine = {id(p) for p in self.parameters_of(optimizer)}
        others = {id(p): p for one in self.optimizers for p in self.parameters_of(one) if id(p) not in mine}
        self._toggled = [(p, p.grad) for p in others.values()]
        for p in others.values():
            p.grad = None

    def untoggle_optimizer(self, optimizer: Any = None, optimizer_idx: int = 0) -> None:
        """Their gradients are what they were: parameters stay as they are, so that strategies need not know of it."""
        for p, grad in self._toggled:
            p.grad = grad
        self._toggled = []

    def parameters_of(self, optimizer: Any) -> list[torch.Tensor]:
        return [p for group in optimizer.param_groups for p in group["params"]]

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Of a training step, the values of all ranks, stacked. An evaluation has all samples on every rank."""
        gather = getattr(builtins, "gather", None)
        if gather is None or not self.training or self.world_size == 1:
            return data
        return tree_map_only(torch.Tensor, lambda t: torch.stack(gather(t, sync_grads=sync_grads)), data)

    def print(self, *values: Any, **kwargs: Any) -> None:
        if self.is_global_zero:
            print(*values, **kwargs)
