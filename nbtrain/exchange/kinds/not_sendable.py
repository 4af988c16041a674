"""Refuses objects that belong to one process, with the reason, or finds them by name on the other side."""

from __future__ import annotations

import builtins
import logging
import sys
from typing import Any
from weakref import WeakSet

from nbtrain.base.errors import CannotTravel
from nbtrain.exchange.kinds.base import CompoundKind, Kind, Node, Receiver, Sender
from nbtrain.exchange.kinds.objects import INSTANCE, InstanceKind, plain_instance
from nbtrain.exchange.kinds.remedies import bound_to_ranks, counts_processes, known_reason


class RefusedKind(Kind):
    """Locks, files, sockets, widgets, ...: the object that the user made is named, not the lock deep inside it."""

    name = "refused"
    lasting = True  # inside an object's own pickle too: cloudpickle would take a file's whole text along

    def make_args(self, node: Node, walk: Sender) -> Any:
        reason = known_reason(type(node.obj)) or bound_to_ranks(node.obj)
        raise CannotTravel(reason or "it belongs to the process that made it")


STREAMS = ("stdout", "stderr", "stdin", "__stdout__", "__stderr__", "__stdin__")


def _by_name(name: str) -> Any:
    if name != "shell":
        return getattr(sys, name)
    shell: Any = getattr(builtins, "get_ipython", None)
    if shell is None:  # a rank that opens its first parcel; not imported here, so asked where it was loaded
        loaded: Any = sys.modules.get("IPython.core.getipython")
        shell = getattr(loaded, "get_ipython", None)
    value = shell() if shell is not None else None
    if value is None:
        raise CannotTravel("get_ipython() exists in a notebook's shell only; leave it out of what the cell reads")
    return value


def _name_of(obj: Any) -> str | None:
    for name in STREAMS:
        if obj is getattr(sys, name, None):
            return name
    for base in type(obj).__mro__:
        if base.__module__ == "ipykernel.iostream" and base.__name__ == "OutStream":
            # Somebody has put another one in its place for a while (%%capture).
            return obj.name if obj.name in STREAMS else None
        if base.__module__ == "IPython.core.interactiveshell" and base.__name__ == "InteractiveShell":
            return "shell"
    return None


class LogHandlerKind(InstanceKind):
    """A handler of `logging`: what it writes to decides whether it can travel; its lock is made anew."""

    name = "log handler"

    def fields(self, obj: Any) -> tuple[list[str], list[Any]]:
        attributes = {key: value for key, value in vars(obj).items() if key != "lock"}
        return list(attributes), list(attributes.values())

    def make(self, args: Any, receiver: Receiver) -> Any:
        made = super().make(args, receiver)
        made.createLock()
        return made


REFUSED: Kind = RefusedKind()
BY_NAME: Kind = CompoundKind("by name", lambda obj: (_name_of(obj),), _by_name)
"""What every process has one of: its own standard streams, its own shell."""
LOG_HANDLER: Kind = LogHandlerKind()
_PLAIN: WeakSet[type] = WeakSet()
"""classes about which there is nothing to say here; one that a cell defined anew is let go"""


def kind_of(obj: Any) -> Kind | None:
    cls = type(obj)
    if cls in _PLAIN:
        return None
    if _name_of(obj) is not None:
        return BY_NAME
    if known_reason(cls) is not None:
        return REFUSED
    if counts_processes(cls) is not None:
        return REFUSED if bound_to_ranks(obj) is not None else None
    if issubclass(cls, logging.Handler):
        return LOG_HANDLER if plain_instance(obj) is INSTANCE else None
    if not hasattr(cls, "write") and not hasattr(cls, "run_cell"):
        _PLAIN.add(cls)
    return None
