"""What DeepSpeed's engine is given for the model: one module that runs whichever call is made of the user's, in the
precision that was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from nbtrain.compat.pytree import tree_map
from nbtrain.strategies.kit.call_router import call_plainly

LOW = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class WrappedModule(nn.Module):
    """`target`: whose call it is that runs."""

    def __init__(self, models: list[nn.Module], precision: str, device: torch.device, whole: bool) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.target: nn.Module | None = None
        self.low = LOW.get(precision)
        self.mixed = MIXED.get(precision, self.low)  # what has kept its 32 bits (buffers) meets what has not
        self.device_type = device.type
        self.cache = whole  # a cast that autocast keeps would outlive the gathered parameter it was made of

    def forward(self, name: str, args: Any, kwargs: Any) -> Any:
        assert self.target is not None
        if self.low is not None:
            args, kwargs = tree_map(lambda t: _cast(t, self.low), (args, kwargs))
        context: AbstractContextManager[Any] = nullcontext()
        if self.mixed is not None:
            context = torch.autocast(self.device_type, dtype=self.mixed, cache_enabled=self.cache)
        with context:
            out = call_plainly(self.target, name, args, kwargs)
        low = self.mixed
        out = tree_map(lambda t: t.float() if isinstance(t, torch.Tensor) and t.dtype == low else t, out)
        return (out,)  # stage 3 looks for tensors in it, and cannot take a number


def outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are no part of another one."""
    found = list(modules)
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
