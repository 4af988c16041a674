"""What a library puts on modules, to be taken off between cells and put on again for the next one.

Libraries change a module's class, add entries to its tables of hooks, and add keys to its `__dict__`. Between cells
the exchange looks at modules, and is to find them as the notebook knows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbtrain.compat.modules import is_hook_table, new_hook_key

MISSING = object()

Entries = list[tuple[Any, Any]]


class Attachment:
    """What one object wears. Tables are the dicts in its `__dict__` whose names say that they hold hooks."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.plain = self.dressed = type(owner)
        self.before = {key: dict(value) if _is_table(key, value) else value for key, value in vars(owner).items()}
        self.attributes: dict[str, tuple[Any, Any]] = {}
        """name → (what was there, what is there now)"""
        self.front: dict[str, Entries] = {}
        """table → entries that the library put before those that were there"""
        self.back: dict[str, Entries] = {}

    def measure(self) -> None:
        """The library is done."""
        self.dressed = type(self.owner)
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
        if type(self.owner) is self.dressed:
            self.owner.__class__ = self.plain

    def on(self) -> None:
        own = vars(self.owner)
        self.plain = type(self.owner)
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
        self.owner.__class__ = self.dressed


class LibraryAttachments:
    """What several objects wear."""

    def __init__(self) -> None:
        self.garments: list[Attachment] = []
        self.worn = False

    def start(self, owners: Iterable[Any]) -> None:
        """Before the library does its work."""
        self.garments = [Attachment(owner) for owner in {id(owner): owner for owner in owners}.values()]

    def finish(self) -> None:
        """It is done."""
        for garment in self.garments:
            garment.measure()
        self.worn = True

    def off(self) -> None:
        if self.worn:
            self.worn = False
            for garment in self.garments:
                garment.off()

    def on(self) -> None:
        if not self.worn:
            self.worn = True
            for garment in self.garments:
                garment.on()


def _is_table(key: str, value: Any) -> bool:
    return isinstance(value, dict) and is_hook_table(key)


def _free(name: Any, table: dict[Any, Any]) -> Any:
    while name in table:
        name = new_hook_key()
    return name
