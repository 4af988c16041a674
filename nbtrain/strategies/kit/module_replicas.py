"""Makes light copies of a module for parts of a batch: each module in it is another one, and weights are shared.

What a forward changes is not shared: attributes that it sets, buffers that it writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType, MethodType
from typing import Any

import torch
from torch import nn

from nbtrain.compat import modules as torch_modules
from nbtrain.compat.modules import BUFFERS, CALL, CHILDREN, FLAT_WEIGHTS, PARAMETERS
from nbtrain.strategies.base import is_lazy

Move = Callable[[torch.Tensor], torch.Tensor]


def replica(
    module: nn.Module,
    parameters: Mapping[int, torch.Tensor] = MappingProxyType({}),
    buffer: Move = torch.Tensor.clone,
    training: bool | None = None,
) -> nn.Module:
    """A light copy of the module. `parameters`: id → what the copy has in the place of that parameter, where it is
    another one. `buffer`: makes the copy's buffer. `training`: the mode of all of it."""
    parts = list(module.modules())
    copies = {id(part): _shell(part) for part in parts}
    buffers: dict[int, torch.Tensor] = {}
    for part in parts:
        old, new = vars(part), vars(copies[id(part)])
        new[CHILDREN] = {name: None if m is None else copies[id(m)] for name, m in old[CHILDREN].items()}
        new[PARAMETERS] = {n: p if p is None else parameters.get(id(p), p) for n, p in old[PARAMETERS].items()}
        for b in old[BUFFERS].values():
            if b is not None and id(b) not in buffers:
                buffers[id(b)] = b if is_lazy(b) else buffer(b.detach())
        new[BUFFERS] = {name: None if b is None else buffers[id(b)] for name, b in old[BUFFERS].items()}
        if training is not None:
            new["training"] = training
        _rebind(new, copies)
        if parameters and isinstance(part, nn.RNNBase):
            new[FLAT_WEIGHTS] = [new[PARAMETERS].get(name) for name in torch_modules.flat_weight_names(part)]
    for part in torch_modules.compiled_parts(module):
        torch_modules.recompile_call(copies[id(part)])
    return copies[id(module)]


def _shell(part: nn.Module) -> nn.Module:
    made: nn.Module = object.__new__(type(part))
    vars(made).update(vars(part))
    vars(made).pop(CALL, None)  # split_batch.py has put it there
    return made


def _rebind(own: dict[str, Any], copies: Mapping[int, nn.Module]) -> None:
    """Methods that are held as attributes (`self.forward = self.forward_fast`), and modules that are in no table."""
    for name, value in own.items():
        if type(value) is MethodType and id(value.__self__) in copies:
            own[name] = MethodType(value.__func__, copies[id(value.__self__)])
        elif isinstance(value, nn.Module) and id(value) in copies:
            own[name] = copies[id(value)]
