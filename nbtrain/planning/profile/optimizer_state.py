"""What an optimizer comes to keep, and what its step takes for a moment: one step of its own code, on shapes alone.

On torch's device "meta", which is faster than fake tensors: an optimizer's arithmetic needs nothing that those know
more. What it keeps as numbers (how many steps there were) is there.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.compat import modules
from nbtrain.planning.profile.trace import LiveBytes, size, tensors
from nbtrain.training.precision.autocast import changed


@dataclass(slots=True)
class Stepped:
    name: str
    state: dict[int, int] = field(default_factory=dict)
    """bytes, by the weight's id"""
    step: int = 0
    step_together: int = 0
    """where torch steps all weights at once, as it does on GPUs"""
    notes: tuple[str, ...] = ()


def step(optimizer: Optimizer | None, weights: Mapping[int, torch.Tensor]) -> Stepped:
    """`weights`: by the id of the real one, something of its shape and dtype; with a gradient, if it gets one."""
    hollow = {key: _hollow(weight) for key, weight in weights.items()}
    if optimizer is None:
        trained = {key: one for key, one in hollow.items() if one.requires_grad}
        found = _stepped(torch.optim.AdamW(trained.values()), {id(one): one for one in trained.values()})
        found.state = {key: found.state.get(id(one), 0) for key, one in trained.items()}
        found.notes = ("no optimizer was found, so AdamW is assumed", *found.notes)
        return found
    return _stepped(optimizer, hollow)


def _hollow(weight: torch.Tensor) -> torch.Tensor:
    new = nn.Parameter(_meta(weight), weight.requires_grad)
    if weight.grad is not None:
        new.grad = _sparse(new) if weight.grad.is_sparse else torch.empty_like(new)
    return new


def _meta(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="meta")


def _sparse(weight: torch.Tensor) -> torch.Tensor:
    places = torch.empty(1, 0, dtype=torch.long, device="meta")
    values = torch.empty(0, *weight.shape[1:], dtype=weight.dtype, device="meta")
    return torch.sparse_coo_tensor(places, values, weight.shape, device="meta", check_invariants=False)


def _stepped(optimizer: Optimizer, weights: Mapping[int, torch.Tensor]) -> Stepped:
    found = Stepped(type(optimizer).__name__)
    try:
        found.state, found.step = _run(optimizer, weights, together=False)
    except Exception as error:  # it wants a closure, or numbers that are not there
        found.state = {
            key: sum(map(size, tensors(optimizer.state.get(real)))) for key, real in _held(optimizer, weights)
        }
        found.notes = (
            f"the step of {found.name} could not be tried ({type(error).__name__}), so its state is counted as it is "
            "now: make one step first",
        )
        return found
    try:
        found.step_together = _run(optimizer, weights, together=True)[1]
    except Exception:  # not all of torch's optimizers can
        found.step_together = found.step
    return found


def _held(optimizer: Optimizer, weights: Mapping[int, torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    return [(id(p), p) for group in optimizer.param_groups for p in group["params"] if id(p) in weights]


def _run(optimizer: Optimizer, weights: Mapping[int, torch.Tensor], together: bool) -> tuple[dict[int, int], int]:
    twin = _twin(optimizer, weights, together)
    held = list(weights.values())
    gradients = [one.grad for one in held if one.grad is not None]
    apart = [*held, *gradients, *tensors(list(twin.state.values()))]
    memory = LiveBytes(apart, numbers=True)
    with memory:
        twin.step()
    state = {key: sum(map(size, tensors(twin.state.get(weights[key])))) for key, _ in _held(optimizer, weights)}
    fused = all(group.get("fused") for group in optimizer.param_groups)  # all of it in one kernel
    return state, 0 if fused else max(memory.high().bytes - memory.live, 0)


def _twin(optimizer: Optimizer, weights: Mapping[int, torch.Tensor], together: bool) -> Any:
    """The same optimizer, of what stands for its weights."""
    twin: Any = object.__new__(type(optimizer))
    # A scheduler has put a `step` there that counts those of the real one.
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in vars(optimizer).items():
        if modules.is_hook_table(name):
            vars(twin)[name] = OrderedDict()
        elif isinstance(value, dict | list):
            vars(twin)[name] = type(value)(value) if type(value) in (dict, list) else value
    twin.param_groups = [_group(group, weights, together) for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    for key, real in _held(optimizer, weights):
        if real in optimizer.state:
            twin.state[weights[key]] = _state(optimizer.state[real], weights[key])
    return twin


def _state(state: dict[str, Any], weight: torch.Tensor) -> dict[str, Any]:
    """Without content, and in the weight's precision if it is a lower one."""

    def like(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return torch.ones((), dtype=tensor.dtype)  # steps, most likely
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
    """A learning rate may be a tensor."""
    return 1e-3 if isinstance(value, torch.Tensor) and value.numel() == 1 else value
