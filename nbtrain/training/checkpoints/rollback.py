"""What models, optimizers and schedulers held before something was loaded into them, to be put back exactly."""

from __future__ import annotations

import copy
from typing import Any

import torch

from nbtrain.training.checkpoints.content import CheckpointObjects


class Rollback:
    """Made before; it holds a copy of all tensors."""

    def __init__(self, objects: CheckpointObjects) -> None:
        modules = objects.modules.values()
        owned = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        self._optimizers = [(one, *_state(one)) for one in objects.optimizers.values()]
        for optimizer, state, _ in self._optimizers:
            owned += [p for group in optimizer.param_groups for p in group["params"]]
            owned += [value for held in state.values() for value in held.values() if isinstance(value, torch.Tensor)]
        # By address: what two share is copied once.
        unique = {id(tensor): tensor for tensor in owned}.values()
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in unique if not tensor.is_meta]
        self._schedulers = [(one, copy.deepcopy(one.state_dict())) for one in objects.schedulers.values()]

    def put_back(self) -> None:
        with torch.no_grad():
            for tensor, content in self._tensors:
                if not torch.equal(tensor, content):
                    tensor.copy_(content)
        for optimizer, state, groups in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update({p: dict(held) for p, held in state.items()})
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                for name in group.keys() - options.keys() - {"params"}:
                    del group[name]
                group.update(options)
        for scheduler, held in self._schedulers:
            scheduler.load_state_dict(held)


def _state(optimizer: torch.optim.Optimizer) -> tuple[dict[Any, dict[str, Any]], list[dict[str, Any]]]:
    """Its state, and the options of its groups; the tensors themselves are copied elsewhere."""
    options = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {p: dict(held) for p, held in optimizer.state.items()}, options
