"""What a cell asks of autograd while its models are in pieces: `backward`, `grad` and `functional_call`.

`torch.autograd.grad(loss, weights)`: what the graph of a forward knows are the gathered weights, so their gradients are
asked for. A backward would leave the ranks' mean of them, each rank its part, and that is the answer here, too. Which
weights a rank's graph has may depend on its batch: a rank that did not use one gives zeros for it, as in a backward,
and unused is what no rank has used.

`torch.func.functional_call(model, weights, x)`: fully_shard's hooks would put the model's own weights in the place of
those given, so the model is called without them. Weights in pieces are whole when they meet the batch
(`whole_values.py`).

What cannot work is refused with a sentence, before torch fails somewhere inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from nbtrain.base.errors import NotSupported
from nbtrain.compat import autograd_engine, dtensor, tensors
from nbtrain.compat.intercept import Listeners, While
from nbtrain.compat.pytree import tree_map_only
from nbtrain.compat.replaced_functions import FUNCTIONAL_CALL
from nbtrain.strategies.base import Component
from nbtrain.strategies.fsdp.fully_shard import ShardedTree
from nbtrain.strategies.fsdp.refusals import unknown
from nbtrain.strategies.fsdp.whole_values import full_tensor_in_graph, mean_of_ranks, part_of
from nbtrain.strategies.kit import checkpoint_calls, functional_transforms
from nbtrain.strategies.kit.call_arguments import kept, listed
from nbtrain.strategies.kit.named_tensors import hooked

BACKWARD_ARGUMENTS = ("grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")
GRAD_ARGUMENTS = ("grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched")
SEES = "under fsdp would see nothing of it, or this rank's share"
"""a hook on a gradient"""
UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is "
    "the desired behavior."
)


class InPieces(Protocol):
    """A component whose weights are in pieces."""

    trees: list[ShardedTree]

    def holds(self, tensor: torch.Tensor) -> bool: ...
    def in_graphs(self, tensor: torch.Tensor) -> torch.Tensor | None: ...


def refuse_hooks(p: torch.Tensor, gathered: torch.Tensor | None, of: Component | None = None) -> None:
    """Autograd accumulates into the gathered weights: it calls no hook of a parameter in pieces."""
    for each in (p, gathered):  # no generator: all weights come here in each backward
        if each is not None and tensors.hook_table(each, tensors.GRADIENT_HOOKS):
            raise hooked(p, SEES, of=of)


def _put(listeners: Listeners) -> None:
    listeners.listen("torch.autograd.backward", "pieces", _backward)
    listeners.listen("torch.autograd.grad", "pieces", _grad)
    checkpoint_calls.put(listeners)
    listeners.listen(FUNCTIONAL_CALL, "pieces", _functional_call)


listening: While[InPieces] = While(_put)
"""Components whose cells run."""


def _backward(old: Callable[..., Any]) -> Callable[..., Any]:
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for component in listening.owners:
            for tree in component.trees:
                tree.check_replaced()
        tensors = tree_map_only(DTensor, full_tensor_in_graph, tensors)
        kwargs |= zip(BACKWARD_ARGUMENTS, args, strict=False)
        if kwargs.get("inputs") is None:
            return old(tensors, **kwargs)
        kwargs["inputs"] = list(_in_graphs(listed(kept(kwargs["inputs"]))))
        return dtensor.untouched(old, tensors, **kwargs)

    return backward


def _in_graphs(inputs: list[Any]) -> Iterator[Any]:
    """These, and what graphs of forwards have in the places of weights in pieces: only there a gradient arrives."""
    for tensor in inputs:
        yield tensor
        if isinstance(tensor, DTensor) and (gathered := _gathered(tensor)) is not None:
            yield gathered


def _functional_call(old: Callable[..., Any]) -> Callable[..., Any]:
    def functional_call(module: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
        parts = set(map(id, module.modules())) if isinstance(module, nn.Module) else set()
        known = (tree for component in listening.owners for tree in component.trees)
        trees = [tree for tree in known if tree.attachments.attached and tree.parts & parts]
        if trees:
            weights = tree_map_only(DTensor, functional_transforms.complete, weights)
        for tree in trees:
            tree.reshard()
            tree.take_off()
        before, checkpoint_calls.weights_given[0] = checkpoint_calls.weights_given[0], bool(trees)
        try:
            return old(module, weights, *args, **kwargs)
        finally:
            checkpoint_calls.weights_given[0] = before
            for tree in trees:
                tree.put_on()

    return functional_call


def _grad(old: Callable[..., Any]) -> Callable[..., Any]:
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs, outputs = kept(inputs), kept(outputs)
        given = listed(inputs)
        again = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
        if again and _through_units(listed(outputs)):
            raise NotSupported(
                "a gradient of a gradient (create_graph=True) cannot be taken through a model under fsdp: its gathered "
                "weights are let go of after the first. --strategy ddp can"
            )
        if again and any(isinstance(tensor, DTensor) for tensor in given):
            raise unknown("torch.autograd.grad(create_graph=True)", next(t for t in given if isinstance(t, DTensor)))
        outputs = tree_map_only(DTensor, full_tensor_in_graph, outputs)
        if not any(_is_weight(tensor) for tensor in given):
            return old(outputs, inputs, *args, **kwargs)
        gradients = _gradients(old, outputs, given, {**dict(zip(GRAD_ARGUMENTS, args, strict=False)), **kwargs})
        return dict(zip(inputs, gradients, strict=True)) if isinstance(inputs, dict) else gradients

    return grad


def _is_weight(tensor: torch.Tensor) -> bool:
    """A parameter in pieces, or what is gathered of one."""
    return any(component.holds(tensor) for component in listening.owners)


def _gathered(tensor: torch.Tensor) -> torch.Tensor | None:
    """What autograd knows in the place of a parameter in pieces."""
    known = (component.in_graphs(tensor) for component in listening.owners)
    return next((gathered for gathered in known if gathered is not None and gathered.requires_grad), None)


def _through_units(outputs: list[Any]) -> bool:
    roots = [output for output in outputs if isinstance(output, torch.Tensor)]
    return any(autograd_engine.is_unit_gatherer(node) for root in roots for node in autograd_engine.nodes_below(root))


def _gradients(grad: Callable[..., Any], outputs: Any, inputs: list[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """`grad`: torch's. `options`: its keyword arguments."""
    zeros = options.pop("materialize_grads", False)
    unused = options.pop("allow_unused", None) or zeros
    twins = [_gathered(tensor) for tensor in inputs]
    asked = [*inputs, *(twin for twin in twins if twin is not None)]
    answers_of_autograd = iter(dtensor.untouched(grad, outputs, asked, allow_unused=True, **options))
    own = [next(answers_of_autograd) for _ in inputs]
    # Of a weight's gradient a rank has all, from its own batch; `here` is what it has, by the weight as graphs know it.
    here: list[tuple[torch.Tensor, torch.Tensor | None] | None] = []
    for number, (tensor, twin) in enumerate(zip(inputs, twins, strict=True)):
        if twin is not None:
            here.append((twin, next(answers_of_autograd)))
        elif not isinstance(tensor, DTensor) and _is_weight(tensor):
            here.append((tensor, own[number]))
            own[number] = None
        else:
            here.append(None)
    means = iter(_means([pair for pair in here if pair is not None], options))
    answers: list[Any] = []
    for tensor, gradient, pair in zip(inputs, own, here, strict=True):
        mean = None if pair is None else next(means)
        if mean is not None:
            part = part_of(mean.to(tensor.dtype), tensor) if isinstance(tensor, DTensor) else mean
            gradient = part if gradient is None else gradient + part
        if gradient is None and not unused:
            raise RuntimeError(UNUSED)
        answers.append(torch.zeros_like(tensor) if gradient is None and zeros else gradient)
    return tuple(answers)


def _means(pairs: list[tuple[torch.Tensor, torch.Tensor | None]], options: dict[str, Any]) -> list[torch.Tensor | None]:
    """The mean of all ranks' gradients, by (weight, this rank's gradient); None where no rank has one. Collective."""
    if not pairs:
        return []
    used = torch.tensor([float(gradient is not None) for _, gradient in pairs], device=pairs[0][0].device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    batch: tuple[int, ...] = ()
    if options.get("is_grads_batched"):
        given = options["grad_outputs"]
        first = (
            given
            if isinstance(given, torch.Tensor)
            else next(gradient_there for gradient_there in given if gradient_there is not None)
        )
        batch = (len(first),)

    def zeros(weight: torch.Tensor) -> torch.Tensor:
        return weight.new_zeros(batch + weight.shape, dtype=getattr(weight, "grad_dtype", None))  # of newer torch

    return [
        mean_of_ranks(zeros(weight) if gradient is None else gradient) if anywhere else None
        for (weight, gradient), anywhere in zip(pairs, used.tolist(), strict=True)
    ]
