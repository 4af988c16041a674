"""What a cell asks of autograd while DeepSpeed's engine has its models: `grad`, `functional_call` and functions of its
own. What DeepSpeed's hooks cannot follow is refused with a sentence, as in a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nbtrain.base.errors import NbtrainError, NotSupported
from nbtrain.compat import deepspeed as ds
from nbtrain.compat.autograd_engine import nodes_below
from nbtrain.compat.intercept import Listeners, While
from nbtrain.compat.replaced_functions import FUNCTIONAL_CALL
from nbtrain.strategies.deepspeed import error_texts
from nbtrain.strategies.deepspeed.engine_parts import EngineParts
from nbtrain.strategies.deepspeed.whole_parameters import PARTS, WholeView, applied
from nbtrain.strategies.kit import checkpoint_calls, functional_transforms
from nbtrain.strategies.kit.call_arguments import kept, listed
from nbtrain.strategies.kit.named_tensors import unknown


def _grad(old: Callable[..., Any]) -> Callable[..., Any]:
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = kept(inputs)
        again = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        if again and _through_gathered(outputs):
            raise NotSupported(error_texts.SPENT)
        for tensor in listed(inputs):
            if isinstance(tensor, WholeView):
                raise unknown("torch.autograd.grad", tensor.nbtrain_shown()[0], PARTS)
        try:
            return old(outputs, inputs, *args, **kwargs)
        except NbtrainError:
            raise
        except Exception as error:
            sentence = error_texts.of_backward(error, max(owner.stage for owner in listening.owners))
            if sentence is None:
                raise
            raise NotSupported(sentence) from error

    return grad


def _functional(old: Callable[..., Any]) -> Callable[..., Any]:
    def functional_call(module: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        known = {id(p) for owner in listening.owners if owner.stage == 3 for p in owner.parameters}
        if known and isinstance(module, nn.Module) and any(id(p) in known for p in module.parameters()):
            own = dict(module.named_parameters(remove_duplicate=False))
            if any(name in own and value is not own[name] for name, value in weights.items()):
                raise NotSupported(error_texts.OTHER_WEIGHTS)
        return old(module, weights, *args, **kwargs)

    return functional_call


def _through_gathered(outputs: Any) -> bool:
    """A model of stage 3 has made it: its weights are let go of by the first gradient, and the second reads others."""
    if not any(owner.stage == 3 for owner in listening.owners):
        return False
    roots = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return any(ds.gathers(node) for root in roots if isinstance(root, torch.Tensor) for node in nodes_below(root))


def _put(listeners: Listeners) -> None:
    listeners.listen("torch.autograd.grad", "deepspeed", _grad)
    listeners.listen(FUNCTIONAL_CALL, "deepspeed", _functional)
    functional_transforms.put(listeners)
    listeners.listen("torch.autograd.Function.apply", "deepspeed", applied)
    checkpoint_calls.put(listeners)


listening: While[EngineParts] = While(_put)
"""Engines whose cells run."""
