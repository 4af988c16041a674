"""Lines that cannot work on sharded parameters: refused with a sentence before torch fails somewhere inside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbtrain.compat import autograd_engine, tensors
from nbtrain.compat.pytree import tree_map_only
from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners, While
from nbtrain.strategies.fsdp.grad_by_name import gradients
from nbtrain.strategies.fsdp.mixed_operands import whole_of
from nbtrain.strategies.kit.call_arguments import kept, listed


class Refusals:
    """Refuses what `torch.autograd.backward` and `grad` cannot do for one component, while a cell runs."""

    def __init__(
        self, strategy: str, mine: Callable[[torch.Tensor], bool], in_graphs: Callable[[torch.Tensor], Any]
    ) -> None:
        """`mine`: whether this is one of the sharded parameters. `in_graphs`: what autograd knows in its place, or
        None."""
        self.strategy = strategy
        self.mine = mine
        self.in_graphs = in_graphs

    def on(self) -> None:
        _while.on(self)

    def off(self) -> None:
        _while.off(self)


def refuse_hooks(parameters: Iterable[torch.Tensor | None], strategy: str) -> None:
    """Autograd accumulates into the gathered weights: it calls no hook of a parameter in pieces."""
    if any(p is not None and tensors.hook_table(p, tensors.GRADIENT_HOOKS) for p in parameters):
        raise NotSupported(
            f"a parameter has a hook on its gradient (register_hook), which under {strategy} would see nothing of it, "
            "or this rank's share: work on the gradients between loss.backward() and optimizer.step(), or use "
            "--strategy ddp"
        )


def _put(listeners: Listeners) -> None:
    listeners.listen("torch.autograd.backward", "pieces", _backward)
    listeners.listen("torch.autograd.grad", "pieces", _grad)


_while: While[Refusals] = While(_put)
_open = _while.owners


def _backward(old: Callable[..., Any]) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return old(tree_map_only(DTensor, whole_of, tensors), *args, **kwargs)

    return backward


def _grad(old: Callable[..., Any]) -> Callable[..., Any]:
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs, outputs = kept(inputs), kept(outputs)
        given = listed(inputs)
        again = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        if again and _open and _through_units(listed(outputs)):
            raise NotSupported(
                f"a gradient of a gradient (create_graph=True) cannot be taken through a model under "
                f"{_open[0].strategy}: its gathered weights are let go of after the first. --strategy ddp can"
            )
        outputs = tree_map_only(DTensor, whole_of, outputs)
        if not any(_mine(one) for one in given):
            return old(outputs, inputs, *args, **kwargs)
        found = gradients(functools.partial(old, outputs), given, _twin, _mine, args, kwargs)
        return dict(zip(inputs, found, strict=True)) if isinstance(inputs, dict) else found

    return grad


def _mine(tensor: torch.Tensor) -> bool:
    return any(held.mine(tensor) for held in _open)


def _twin(tensor: torch.Tensor) -> torch.Tensor | None:
    return next((twin for held in _open if (twin := held.in_graphs(tensor)) is not None), None)


def _through_units(outputs: Any) -> bool:
    roots = [one for one in outputs if isinstance(one, torch.Tensor)]
    return any(autograd_engine.is_unit_gatherer(node) for root in roots for node in autograd_engine.nodes_below(root))
