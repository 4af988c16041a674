"""Measures an optimizer's state and the temporary memory of its step: one step of its own code, on meta tensors.

The device "meta" is faster than fake tensors and does for an optimizer's arithmetic. State that is a plain number, such
as a count of steps, has its value.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.annexes.planning.profile.memory_trace import LiveBytes, size
from nbtrain.compat import modules
from nbtrain.strategies.kit.call_arguments import all_tensors
from nbtrain.worker.precision.autocast import changed


@dataclass(slots=True)
class OptimizerStep:
    """What one step of an optimizer takes."""

    name: str
    state: dict[int, int] = field(default_factory=dict)
    """bytes by the weight's id"""
    step: int = 0
    """temporary bytes"""
    step_together: int = 0
    """the same where torch steps all weights at once (`foreach`), as it does on GPUs"""
    notes: tuple[str, ...] = ()


def step(optimizer: Optimizer | None, weights: Mapping[int, torch.Tensor], dense: bool = False) -> OptimizerStep:
    """One step. `weights`: by the id of the real one, of its shape and dtype, with a gradient if it gets one; `dense`:
    without them, as each that is trained gets a dense one."""
    on_meta = {key: _on_meta(weight, dense) for key, weight in weights.items()}
    if optimizer is None:
        trained = {key: one for key, one in on_meta.items() if one.requires_grad}
        found = _stepped(torch.optim.AdamW(trained.values()), {id(one): one for one in trained.values()})
        found.state = {key: found.state.get(id(one), 0) for key, one in trained.items()}
        found.notes = ("no optimizer found: AdamW is assumed", *found.notes)
        return found
    return _stepped(optimizer, on_meta)


def _on_meta(weight: torch.Tensor, dense: bool) -> torch.Tensor:
    new = nn.Parameter(_meta(weight), weight.requires_grad)
    if dense and weight.requires_grad:
        new.grad = torch.empty_like(new)
    elif not dense and weight.grad is not None:
        new.grad = _sparse(new) if weight.grad.is_sparse else torch.empty_like(new)
    return new


def _meta(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="meta")


def _sparse(weight: torch.Tensor) -> torch.Tensor:
    places = torch.empty(1, 0, dtype=torch.long, device="meta")
    values = torch.empty(0, *weight.shape[1:], dtype=weight.dtype, device="meta")
    return torch.sparse_coo_tensor(places, values, weight.shape, device="meta", check_invariants=False)


def _stepped(optimizer: Optimizer, weights: Mapping[int, torch.Tensor]) -> OptimizerStep:
    found = OptimizerStep(type(optimizer).__name__)
    try:
        found.state, found.step = _run(optimizer, weights, together=False)
    except Exception as error:  # it wants a closure, or numbers that are not there
        found.state = {
            key: sum(map(size, all_tensors(optimizer.state.get(real)))) for key, real in _weights_of(optimizer, weights)
        }
        found.notes = (
            f"a step of {found.name} raised {type(error).__name__}, so its state counts as it is "
            "now: make one step first",
        )
        return found
    try:
        found.step_together = _run(optimizer, weights, together=True)[1]
    except Exception:  # not all of torch's optimizers can
        found.step_together = found.step
    return found


def _weights_of(optimizer: Optimizer, weights: Mapping[int, torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    return [(id(p), p) for group in optimizer.param_groups for p in group["params"] if id(p) in weights]


def _run(optimizer: Optimizer, weights: Mapping[int, torch.Tensor], together: bool) -> tuple[dict[int, int], int]:
    copied = _meta_optimizer(optimizer, weights, together)
    held = list(weights.values())
    gradients = [one.grad for one in held if one.grad is not None]
    apart = [*held, *gradients, *all_tensors(list(copied.state.values()))]
    memory = LiveBytes(apart, numbers=True)
    with memory:
        copied.step()
    state = {
        key: sum(map(size, all_tensors(copied.state.get(weights[key])))) for key, _ in _weights_of(optimizer, weights)
    }
    fused = all(group.get("fused") for group in optimizer.param_groups)  # all of it in one kernel
    return state, 0 if fused else max(memory.peak().bytes - memory.live, 0)


def _meta_optimizer(optimizer: Optimizer, weights: Mapping[int, torch.Tensor], together: bool) -> Any:
    """The same optimizer for the meta tensors."""
    copied: Any = object.__new__(type(optimizer))
    # A scheduler replaces `step` on the object, to count calls of the real one.
    vars(copied).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in vars(optimizer).items():
        if modules.is_hook_table(name):
            vars(copied)[name] = OrderedDict()
        elif isinstance(value, dict | list):
            vars(copied)[name] = type(value)(value) if type(value) in (dict, list) else value
    copied.param_groups = [_group(group, weights, together) for group in optimizer.param_groups]
    copied.state = defaultdict(dict)
    for key, real in _weights_of(optimizer, weights):
        if real in optimizer.state:
            copied.state[weights[key]] = _state(optimizer.state[real], weights[key])
    return copied


def _state(state: dict[str, Any], weight: torch.Tensor) -> dict[str, Any]:
    """State on meta tensors, in the weight's precision if that is lower."""

    def like(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return torch.ones((), dtype=tensor.dtype)  # most likely a count of steps
        lowers = tensor.is_floating_point() and weight.element_size() < tensor.element_size()
        return _meta(tensor, weight.dtype if lowers else None)

    return {name: changed(value, like) for name, value in state.items()}


def _group(group: dict[str, Any], weights: Mapping[int, torch.Tensor], together: bool) -> dict[str, Any]:
    new = {name: _number(value) if name != "params" else value for name, value in group.items()}
    new["params"] = [weights[id(p)] for p in group["params"] if id(p) in weights]
    if new.get("capturable"):
        new["capturable"] = False
    if new.get("fused"):
        new["fused"] = None
    if "foreach" in new and new["foreach"] is None:
        new["foreach"] = together
    return new


def _number(value: Any) -> Any:
    """A number in place of a learning rate that is a tensor."""
    return 1e-3 if isinstance(value, torch.Tensor) and value.numel() == 1 else value
