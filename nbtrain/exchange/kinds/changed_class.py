"""The class of an object that both sides know. A program may set it at any time: lazy layers do at their first call."""

from __future__ import annotations

from typing import Any

from nbtrain.exchange.kinds.base import Sender

CLASS = "__class__"


def class_entry(cls: type, before: type | None, walk: Sender) -> dict[str, Any]:
    """What a state says of its object's class: the class as it is sent, where the other side may have another one or
    where the class is itself one of the objects that both sides know."""
    return {CLASS: walk.encode(cls)} if cls is not before or walk.table.find(cls) is not None else {}


def take_class(obj: Any, now: type, fields: dict[str, Any]) -> None:
    """Give an object the class that its state says, and take that out of the fields."""
    cls = fields.pop(CLASS, now)
    if cls is not now:
        object.__setattr__(obj, CLASS, cls)
