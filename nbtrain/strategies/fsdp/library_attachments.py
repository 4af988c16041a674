"""Takes off between cells what torch puts on modules, and puts it on again for the next one.

`fully_shard` changes a module's class, adds entries to its tables of hooks, and adds keys to its `__dict__`. Between
cells the exchange looks at modules, and is to find them as the notebook knows them. That goes for the lists of weights,
too, that recurrent layers keep beside their attributes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn

from nbtrain.compat.modules import (
    FLAT_WEIGHT_REFERENCES,
    FLAT_WEIGHTS,
    flat_weight_names,
    is_hook_table,
    new_hook_key,
)

MISSING = object()

Entries = list[tuple[Any, Any]]


class Attachment:
    """What a library has put on one object. Tables are the dicts in its `__dict__` that hold hooks."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.own_class = self.library_class = type(owner)
        self.before = {key: dict(value) if _is_table(key, value) else value for key, value in vars(owner).items()}
        self.attributes: dict[str, tuple[Any, Any]] = {}
        """name → (what was there, what is there now)"""
        self.front: dict[str, Entries] = {}
        """table → entries that the library put before those that were there"""
        self.back: dict[str, Entries] = {}

    def record(self) -> None:
        """Note what the library has added."""
        self.library_class = type(self.owner)
        for key, value in vars(self.owner).items():
            old = self.before.get(key, MISSING)
            if _is_table(key, value) and isinstance(old, dict):
                known = [name for name in value if name in old]
                place = list(value).index(known[0]) if known else 0
                fresh = [(i, name, hook) for i, (name, hook) in enumerate(value.items()) if name not in old]
                self.front[key] = [(name, hook) for i, name, hook in fresh if known and i < place]
                self.back[key] = [(name, hook) for i, name, hook in fresh if not known or i > place]
            elif value is not old:
                self.attributes[key] = (old, value)
        self.before = {}

    def off(self) -> None:
        own = vars(self.owner)
        for key, (old, new) in self.attributes.items():
            if own.get(key, MISSING) is new:  # otherwise the cell has put something else there
                if old is MISSING:
                    del own[key]
                else:
                    own[key] = old
        for key, entries in (*self.front.items(), *self.back.items()):
            for name, hook in entries:
                if own[key].get(name) is hook:
                    del own[key][name]
        if type(self.owner) is self.library_class:
            self.owner.__class__ = self.own_class

    def on(self) -> None:
        own = vars(self.owner)
        self.own_class = type(self.owner)
        renamed: dict[Any, Any] = {}
        for key in self.front:
            table = own.setdefault(key, {})
            for entries in (self.front[key], self.back[key]):
                for i, (name, hook) in enumerate(entries):
                    # A hook of the notebook's may have come under this number, which its own process gave it.
                    new = renamed.setdefault(name, _free(name, table))
                    entries[i] = (new, hook)
                    table[new] = hook
            for name, _ in reversed(self.front[key]):
                if hasattr(table, "move_to_end"):
                    table.move_to_end(name, last=False)
        for key, (_, new) in self.attributes.items():
            self.attributes[key] = (own.get(key, MISSING), new)
            own[key] = new
        self.owner.__class__ = self.library_class


class LibraryAttachments:
    """What a library puts on several objects. Made before the library does its work."""

    def __init__(self, owners: Iterable[Any]) -> None:
        self.attachments = [Attachment(owner) for owner in {id(owner): owner for owner in owners}.values()]
        self.attached = False

    def record(self) -> None:
        """After the library has done its work."""
        for attachment in self.attachments:
            attachment.record()
        self.attached = True

    def off(self) -> None:
        if self.attached:
            self.attached = False
            for attachment in self.attachments:
                attachment.off()

    def on(self) -> None:
        if not self.attached:
            self.attached = True
            for attachment in self.attachments:
                attachment.on()


def _is_table(key: str, value: Any) -> bool:
    return isinstance(value, dict) and is_hook_table(key)


def _free(name: Any, table: dict[Any, Any]) -> Any:
    while name in table:
        name = new_hook_key()
    return name


def _nothing() -> None:
    """No lambda: a part of a model may be pickled."""


class FlatWeights:
    """The lists of weights that RNN, LSTM and GRU keep beside their attributes.

    torch makes a list anew whenever the weights are other tensors than those that it refers to: within a cell, the
    gathered ones. Between cells the lists are the notebook's own, with the parameters in them.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.lists: list[tuple[nn.Module, dict[str, list[Any]]]] = []
        for module in modules:
            if isinstance(module, nn.RNNBase):
                lists = FLAT_WEIGHTS, FLAT_WEIGHT_REFERENCES
                of_module = {name: vars(module)[name] for name in lists if name in vars(module)}
                self.lists.append((module, of_module))

    def flatten_never(self) -> None:
        """While a cell runs: on a GPU flattening moves the weights away from where they are gathered."""
        for module, _ in self.lists:
            vars(module)["flatten_parameters"] = _nothing

    def let_go(self) -> None:
        """While a cell runs: `model.to(dtype)` cannot exchange a parameter in pieces that somebody refers to weakly."""
        for _, of_module in self.lists:
            references = of_module.get(FLAT_WEIGHT_REFERENCES, [])
            references[:] = [_nothing] * len(references)  # another weight than before: torch makes the lists anew

    def put_back(self) -> None:
        for module, of_module in self.lists:
            weights = [getattr(module, name, None) for name in flat_weight_names(module)]
            for name, kept in of_module.items():
                kept[:] = weights if name == FLAT_WEIGHTS else [None if w is None else ref(w) for w in weights]
                vars(module)[name] = kept
