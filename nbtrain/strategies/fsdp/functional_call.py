"""`torch.func.functional_call(model, weights, x)`: a model that is in pieces, called with other weights.

fully_shard's hooks would put the model's own in their place. So it is called without them: weights that are in pieces
are whole when they meet the batch (`mixed_operands.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.distributed.tensor import DTensor

from nbtrain.compat.pytree import tree_map_only
from nbtrain.intercept import Listeners, While
from nbtrain.strategies.fsdp.fully_shard import ShardedTree
from nbtrain.strategies.fsdp.mixed_operands import whole_of
from nbtrain.strategies.kit.call_arguments import called_with, with_weights


class HasTrees(Protocol):
    trees: list[ShardedTree]


def on(owner: HasTrees) -> None:
    _while.on(owner)


def off(owner: HasTrees) -> None:
    _while.off(owner)


def _put(listeners: Listeners) -> None:
    for name in ("func", "nn.utils.stateless"):
        listeners.listen(f"torch.{name}.functional_call", "pieces", _called)


_while: While[HasTrees] = While(_put)


def _called(old: Callable[..., Any]) -> Callable[..., Any]:
    def functional_call(*args: Any, **kwargs: Any) -> Any:
        module, weights = called_with(args, kwargs)
        parts = set(map(id, module.modules())) if isinstance(module, nn.Module) else set()
        known = (tree for owner in _while.owners for tree in owner.trees)
        trees = [tree for tree in known if tree.attachments.attached and tree.parts & parts]
        if trees:
            args, kwargs = with_weights(args, kwargs, tree_map_only(DTensor, whole_of, weights))
        for tree in trees:
            tree.reshard()
            tree.take_off()
        try:
            return old(*args, **kwargs)
        finally:
            for tree in trees:
                tree.attachments.on()

    return functional_call
