"""Lines that cannot work on sharded parameters: refused with a sentence before torch fails somewhere inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nbtrain.compat import engine, tensors
from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners, While


class Refusals:
    """Of one strategy's component, in `torch.autograd.backward` and `torch.autograd.grad` while a cell runs."""

    def __init__(self, strategy: str, mine: Callable[[torch.Tensor], bool]) -> None:
        """`mine`: whether this is one of the sharded parameters."""
        self.strategy = strategy
        self.mine = mine

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
        for root in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if isinstance(root, DTensor) and _open:
                raise NotSupported(
                    f"a loss with a term over the parameters themselves (their squares, say) cannot be "
                    f"differentiated under {_open[0].strategy}, where every rank holds a part of them. Use the "
                    "optimizer's weight_decay, or --strategy ddp, under which it works"
                )
        return old(tensors, *args, **kwargs)

    return backward


def _grad(old: Callable[..., Any]) -> Callable[..., Any]:
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        whose = next((held for held in _open if any(held.mine(one) for one in tensors)), None)
        if whose is not None:
            raise NotSupported(
                f"torch.autograd.grad with respect to parameters cannot work under {whose.strategy}: what the graph "
                "holds are the gathered weights. Call loss.backward() and read p.grad, or use --strategy ddp"
            )
        again = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        if again and _open and _through_units([outputs] if isinstance(outputs, torch.Tensor) else outputs):
            raise NotSupported(
                f"a gradient of a gradient (create_graph=True) cannot be taken through a model under "
                f"{_open[0].strategy}: its gathered weights are let go of after the first. --strategy ddp can"
            )
        return old(outputs, given if not isinstance(inputs, torch.Tensor) else inputs, *args, **kwargs)

    return grad


def _through_units(outputs: Any) -> bool:
    todo = [one.grad_fn for one in outputs if isinstance(one, torch.Tensor) and one.grad_fn is not None]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if engine.is_unit_gatherer(node):
            return True
        todo += [following for following, _ in node.next_functions if following is not None]
    return False
