"""Edits an object of the receiver's in place, so that every holder sees the change (`ds.df`, `config["df"]` and `df`).

For objects that a local module's file made on both sides, and those that only their own pickle can move.
"""

from __future__ import annotations

import sys
from typing import Any

from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds import dispatch, python_module_state
from nbtrain.exchange.kinds.base import MISSING, Kind, Node
from nbtrain.exchange.kinds.objects import raw_attribute, slots_of
from nbtrain.exchange.kinds.python_module_state import Place


def made_by_file(place: Place, made: Any, kind: Kind, table: ObjectTable) -> Any:
    """The object that this side's execution of a file made there, if it can become what was `made` of the record."""
    obj = python_module_state.made_at(place)
    if obj is MISSING or type(obj) is not type(made) or kind.identity(obj) in table.by_id:
        return MISSING
    if kind.name == "storage":
        fits = obj.nbytes() == made.nbytes() and obj.device == made.device
    elif kind.name == "array":
        fits = obj.shape == made.shape and obj.dtype == made.dtype and obj.flags.writeable
    elif kind.name == "tensor":
        # its memory is the receiver's own, too, if it could be
        fits = _form(obj) == _form(made) and obj.requires_grad == made.requires_grad
    else:
        fits = not kind.whole and dispatch.kind_of(obj, {}) is kind
    return obj if fits else MISSING


def under_same_key(node: Node | None, made: Any, kind: Kind) -> Any:
    """This side's object of the node, if it can become what was `made` in its place."""
    if node is None or node.kind is not kind or kind is not dispatch.kind_named("opaque"):
        return MISSING
    obj = node.obj
    if obj is made or type(obj) is not type(made):
        return MISSING
    if _is_array(obj):
        fits = obj.shape == made.shape and obj.dtype == made.dtype and obj.flags.writeable and not obj.dtype.hasobject
        return obj if fits else MISSING
    return obj if is_all_python(type(obj)) else MISSING


def is_all_python(cls: type) -> bool:
    """Whether everything that its objects hold is in their `__dict__` and slots, and nothing in C."""
    slots = len(slots_of(cls))
    word = object.__basicsize__ // 2
    wanted = object.__basicsize__ + word * (slots + (cls.__dictoffset__ > 0) + (cls.__weakrefoffset__ > 0))
    return cls.__basicsize__ == wanted and cls.__itemsize__ == 0 and all(b.__flags__ & 1 << 9 for b in cls.__mro__[:-1])


def _is_array(obj: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(obj, numpy.ndarray)


def _form(tensor: Any) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def fill(node: Node, made: Any) -> None:
    """Write the content that came with the record, once nothing can fail any more."""
    if node.kind.name == "storage":
        node.obj.copy_(made)
    elif node.kind.name == "array":
        node.obj[...] = made
    elif node.kind is dispatch.kind_named("opaque"):
        if _is_array(made):
            _bare(node.obj)[...] = _bare(made)
        _take_over(node.obj, made)


def _bare(array: Any) -> Any:
    import numpy as np

    return array.view(np.ndarray)


def _take_over(obj: Any, made: Any) -> None:
    """Give an object the attributes of another of its class. Methods of the class itself are not asked."""
    for slot in slots_of(type(obj)):
        value = raw_attribute(made, slot)
        if value is not MISSING:
            object.__setattr__(obj, slot, value)
        elif raw_attribute(obj, slot) is not MISSING:
            object.__delattr__(obj, slot)
    attributes = raw_attribute(obj, "__dict__", None)
    if isinstance(attributes, dict):
        new = dict(raw_attribute(made, "__dict__", {}))
        attributes.clear()
        attributes.update(new)
