"""`torch.func.functional_call(model, weights, x)`: a model in stages, called with other weights.

Every rank has those that are given, and is sent those that are not; so each computes all of it, as one process does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from nbtrain.compat import autograd_engine, pytree
from nbtrain.errors import NotSupported
from nbtrain.intercept import Listeners, While
from nbtrain.strategies.kit.call_arguments import called_with
from nbtrain.strategies.kit.tensor_spots import is_stage_tensor

WRAPPED = (
    "torch.func.grad, or vmap, was given weights of the model, which under pipeline lie on one rank each, so that it "
    "has no numbers of them on the others: give it copies that every rank has, "
    "`{n: p.detach().clone() for n, p in model.named_parameters()}`, or use --strategy ddp"
)


class FunctionalCall:
    """Handles `functional_call` with a component's models, between `on` and `off`."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.models = list(models)
        self.inside = False
        """a model of these is called so"""

    def on(self) -> None:
        _while.on(self)

    def off(self) -> None:
        self.inside = False
        _while.off(self)

    def has(self, module: nn.Module) -> bool:
        ids = set(map(id, module.modules()))
        return any(id(m) in ids for model in self.models for m in model.modules())


def _put(listeners: Listeners) -> None:
    for name in ("func", "nn.utils.stateless"):
        listeners.listen(f"torch.{name}.functional_call", "pipeline", _called)


_while: While[FunctionalCall] = While(_put)


def _called(old: Callable[..., Any]) -> Callable[..., Any]:
    def functional_call(*args: Any, **kwargs: Any) -> Any:
        module, weights = called_with(args, kwargs)
        held = [one for one in _while.owners if not one.inside and isinstance(module, nn.Module) and one.has(module)]
        if held and any(map(_is_lost, pytree.tree_leaves(weights))):
            raise NotSupported(WRAPPED)
        for one in held:
            one.inside = True
        try:
            return old(*args, **kwargs)
        finally:
            for one in held:
                one.inside = False

    return functional_call


def _is_lost(tensor: Any) -> bool:
    """A transform holds it, and looks at the numbers that this rank has."""
    return not is_stage_tensor(tensor) and is_stage_tensor(autograd_engine.unwrapped(tensor, mapped=True))
