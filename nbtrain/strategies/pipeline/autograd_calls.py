"""What a cell asks of autograd while its models are in stages: `backward`, `grad` and `functional_call`.

Graphs end where a stage begins: whether gradients are to be left in parameters, and which loss a backward starts from,
is known only here. What cannot be answered is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.compat.intercept import Listeners, While
from nbtrain.compat.replaced_functions import FUNCTIONAL_CALL
from nbtrain.strategies.kit import checkpoint_calls, functional_transforms
from nbtrain.strategies.kit.call_arguments import kept, listed
from nbtrain.strategies.kit.stage_tensor import is_stage_tensor, unknown_of
from nbtrain.strategies.pipeline.stage import StagePlace

AGAIN = (
    "a gradient of a gradient (create_graph=True) cannot be taken under pipeline: each rank has the graph of its own "
    "stage only. Use --strategy ddp for it"
)
BY_NAME = (
    "gradients with respect to a model's own parameters cannot be asked for by name (torch.autograd.grad, or "
    "backward(inputs=...)) under pipeline: each rank has the graph of its own stage only. Write the forward, too, into "
    "`with whole(model): …`; or call loss.backward() and read p.grad"
)
OTHER_WEIGHTS = (
    "torch.func.functional_call of a model in stages: other weights would have to go to the ranks that have these. "
    "Give it a copy of the model, which is whole on every rank: `with whole(model): twin = copy.deepcopy(model)`; or "
    "use --strategy ddp"
)


class AutogradCalls:
    """Notes on a component's `place` what a cell asks of autograd, between `on` and `off`."""

    def __init__(self, parameters: Iterable[torch.Tensor], place: StagePlace, models: Iterable[nn.Module] = ()) -> None:
        self.ids = frozenset(map(id, parameters))
        self.place = place
        self.models = list(models)

    def on(self) -> None:
        self.off()
        _while.on(self)

    def off(self) -> None:
        self.place.accumulates, self.place.roots = True, []
        _while.off(self)

    @contextmanager
    def noted(self, inputs: list[Any], roots: list[torch.Tensor] | None) -> Iterator[None]:
        """`roots`: what a backward starts from; None: gradients are not to be left in parameters."""
        place = self.place
        if place.inside or (roots is not None and place.roots):
            yield
            return
        if any(id(tensor) in self.ids for tensor in inputs):
            raise NotSupported(BY_NAME)
        if any(map(is_stage_tensor, inputs)):
            raise unknown_of("torch.autograd.grad", inputs)
        before = place.roots, place.accumulates
        place.roots, place.accumulates = (place.roots, False) if roots is None else (roots, place.accumulates)
        try:
            yield
        finally:
            place.roots, place.accumulates = before

    def has_part(self, module: nn.Module) -> bool:
        """A module of this one is also part of one of the models."""
        ids = set(map(id, module.modules()))
        return any(id(m) in ids for model in self.models for m in model.modules())


def _put(listeners: Listeners) -> None:
    listeners.listen("torch.autograd.backward", "pipeline", _backward)
    listeners.listen("torch.autograd.grad", "pipeline", _grad)
    checkpoint_calls.put(listeners)
    listeners.listen(FUNCTIONAL_CALL, "pipeline", _functional_call)
    functional_transforms.put(listeners)


_while: While[AutogradCalls] = While(_put)
_open = _while.owners


def _backward(old: Callable[..., Any]) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = kept(tensors)
        roots = [root for root in listed(tensors) if isinstance(root, torch.Tensor)]
        if "inputs" in kwargs:
            kwargs["inputs"] = kept(kwargs["inputs"])
        inputs = listed(kwargs.get("inputs", args[4] if len(args) > 4 else None))
        with ExitStack() as around:
            for asked in _open:
                around.enter_context(asked.noted(inputs, roots))
            return old(tensors, *args, **kwargs)

    return backward


def _grad(old: Callable[..., Any]) -> Callable[..., Any]:
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = kept(inputs)
        given = listed(inputs)
        with ExitStack() as around:
            for asked in _open:
                around.enter_context(asked.noted(given, None))
            return old(outputs, inputs, *args, **kwargs)

    return grad


def _functional_call(old: Callable[..., Any]) -> Callable[..., Any]:
    def functional_call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(module, nn.Module) and any(staged.has_part(module) for staged in _open):
            raise NotSupported(OTHER_WEIGHTS)
        return old(module, *args, **kwargs)

    return functional_call
