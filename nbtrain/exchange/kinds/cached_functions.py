"""Moves functions with a `functools.lru_cache`, and the models and optimizers that it keeps."""

from __future__ import annotations

import functools
import sys
from typing import Any

from nbtrain.base.errors import CannotTravel
from nbtrain.compat import python
from nbtrain.exchange.kinds.base import Kind, Node, Receiver, Sender
from nbtrain.exchange.kinds.containers import same_items

MANY = 256
"""Results from which on they are taken for numbers and text: nobody has so many models."""

Entries = list[tuple[tuple[Any, ...], dict[str, Any], Any]]


class LruCacheKind(Kind):
    """`functools.lru_cache`, which pickles by name and then fails on the other side. Of its results those travel that
    are trained (`get_model()`): the ranks would train models of their own, of which the notebook never hears."""

    name = "lru_cache"

    def put_order(self, obj: Any) -> int:
        return 2  # an argument may be known by what it holds

    def make_args(self, node: Node, walk: Sender) -> Any:
        return walk.encode(node.obj.__wrapped__), sorted(node.obj.cache_parameters().items())

    def make(self, args: Any, receiver: Receiver) -> Any:
        return functools.lru_cache(**dict(args[1]))(receiver.decode(args[0]))

    def look(self, node: Node, walk: Sender) -> Any:
        attributes, kept = vars(node.obj), _trained(node.obj)
        entries = [item for args, kwargs, value in kept for item in (*args, *kwargs, *kwargs.values(), value)]
        seen = *attributes, *attributes.values(), *entries
        if node.seen is not None and same_items(seen, node.seen):
            return None
        if kept and not python.can_be_filled(node.obj):
            raise CannotTravel(
                f"its lru_cache keeps a {type(kept[0][2]).__name__}, and cannot be filled on another side, because the "
                "function closes over variables. Give what it returns a name, and use that in the cell"
            )
        node.seen = seen
        encoded = [
            (
                tuple(map(walk.encode, args)),
                [(key, walk.encode(value)) for key, value in kwargs.items()],
                walk.encode(result),
            )
            for args, kwargs, result in kept
        ]
        return list(attributes), list(map(walk.encode, attributes.values())), encoded

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        names, values, encoded = state
        fields = dict(zip(names, map(receiver.decode, values), strict=True))
        attributes = vars(node.obj)
        attributes.clear()
        attributes.update(fields)
        kept = [
            (
                tuple(map(receiver.decode, args)),
                {key: receiver.decode(value) for key, value in kwargs},
                receiver.decode(result),
            )
            for args, kwargs, result in encoded
        ]
        if not same_items([entry[2] for entry in kept], [entry[2] for entry in _trained(node.obj)]):
            node.obj.cache_clear()  # what else it keeps is computed again
            python.fill(node.obj, kept)
        node.seen = None


def _trained(function: Any) -> Entries:
    """The results in a cache that hold a model, an optimizer or a parameter."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "nn") or not 0 < function.cache_info().currsize < MANY:
        return []
    return [entry for entry in python.cached(function) if _holds_weights(entry[2], torch)]


def _holds_weights(value: Any, torch: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds_weights(item, torch) for item in value)
    if isinstance(value, dict):
        return any(_holds_weights(item, torch) for item in value.values())
    lasting = torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler
    return isinstance(value, lasting) or (isinstance(value, torch.Tensor) and value.requires_grad)
