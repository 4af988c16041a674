"""`state_dict()` in a cell: whole, as in one process, a model's under stage 3 and an optimizer's under each. Every rank
has to call it.

What is loaded goes into the pieces: torch would write into what only stands for a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.compat.modules import parameters
from nbtrain.strategies.deepspeed.library import COLLAPSED
from nbtrain.strategies.deepspeed.optimizer_state import EngineOptimizerState


def whole_dicts(
    models: Iterable[nn.Module], gathered: Callable[[list[Any]], Any], fill_piece: Callable[[Any, torch.Tensor], None]
) -> list[Any]:
    """Hooks that gather one parameter at a time, into main memory; returns their handles. `gathered`: DeepSpeed's
    context in which parameters are whole. `fill_piece`: takes this rank's part of a whole."""
    loaded: set[str] = set()

    def fill(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, p in parameters(module).items():
            if p is not None and prefix + name in state and hasattr(p, COLLAPSED):
                # Small ones always are: what gathers them takes them away on this rank, if others do not call.
                there = vars(p)["ds_status"].name == "AVAILABLE"
                with nullcontext() if there else gathered([p]):
                    state[prefix + name] = p.detach().to("cpu", copy=True)

    def take(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
        *_, errors = others
        for name, p in parameters(module).items():
            key = prefix + name
            if p is None or not hasattr(p, COLLAPSED) or key not in state:
                continue
            whole = state.pop(key)
            loaded.add(key)
            if whole.shape == p.shape:
                fill_piece(p, whole.detach())
            else:
                errors.append(f"size mismatch for {key}: {tuple(whole.shape)} is loaded into {tuple(p.shape)}")

    def settle(module: nn.Module, found: Any) -> None:
        found.missing_keys[:] = [key for key in found.missing_keys if key not in loaded]
        loaded.clear()

    parts = list({id(part): part for model in models for part in model.modules() if parameters(part)}.values())
    return [
        *(part.register_state_dict_post_hook(fill) for part in parts),
        *(part.register_load_state_dict_pre_hook(take) for part in parts),
        *(part.register_load_state_dict_post_hook(settle) for part in parts),
    ]


def whole_state(state: EngineOptimizerState, device: torch.device) -> list[Any]:
    """The same for the user's optimizer: one tensor after the other is put together, and then in main memory."""
    optimizer = state.user

    def fill(_: Any, found: dict[str, Any]) -> dict[str, Any]:
        numbers = {
            id(p): number
            for group, packed in zip(optimizer.param_groups, found["param_groups"], strict=True)
            for p, number in zip(group["params"], packed["params"], strict=True)
        }
        entries = {number: {**entry} for number, entry in found["state"].items()}
        for p, key, value in state.parts():
            number = numbers[id(p)]
            entry = entries.setdefault(number, {})
            if isinstance(value, tuple):
                (start, stop), flat = value
                whole = torch.zeros(p.numel(), dtype=flat.dtype, device=device)
                whole[start:stop].copy_(flat)
                dist.all_reduce(whole)
                entry[key] = whole.view(p.shape).cpu()
            else:
                entry[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return {**found, "state": dict(sorted(entries.items()))}

    return [
        optimizer.register_state_dict_post_hook(fill),
        optimizer.register_load_state_dict_post_hook(lambda _: state.load()),
    ]
