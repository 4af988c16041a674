"""`model.state_dict()` in a cell under stage 3: whole weights, as in one process. Every rank has to call it.

`load_state_dict` is refused there: torch would write into what only stands for a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from nbtrain.errors import NotSupported
from nbtrain.strategies._deepspeed.library import COLLAPSED


def whole_dicts(models: Iterable[nn.Module], gathered: Callable[[list[Any]], Any]) -> list[Any]:
    """Hooks that gather one parameter at a time, into main memory; returns their handles. `gathered`: DeepSpeed's
    context in which parameters are whole."""

    def fill(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, p in module._parameters.items():
            if p is not None and prefix + name in state and hasattr(p, COLLAPSED):
                with gathered([p]):
                    state[prefix + name] = p.detach().to("cpu", copy=True)

    def refuse(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if any(hasattr(p, COLLAPSED) and prefix + name in state for name, p in module._parameters.items()):
            raise NotSupported(
                "load_state_dict in a cell, under stage 3, where parameters are in pieces: load it in the notebook "
                "before the cell, call load(path) of a checkpoint, or take --strategy fsdp, under which it works"
            )

    parts = list({id(part): part for model in models for part in model.modules() if part._parameters}.values())
    hooks = [part.register_state_dict_post_hook(fill) for part in parts]
    return [*hooks, *(part.register_load_state_dict_pre_hook(refuse) for part in parts)]
