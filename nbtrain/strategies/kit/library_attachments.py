"""Takes off between cells what a library puts on modules and parameters, and puts it on again for the next one.

`fully_shard` changes a module's class, adds entries to its tables of hooks, and adds keys to its `__dict__`; DeepSpeed
does so, too. Between cells the exchange looks at these objects, and is to find them as the notebook knows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from nbtrain.compat.modules import is_hook_table, new_hook_key

MISSING = object()

Entries = list[tuple[Any, Any]]


class Attachment:
    """What a library has put on one object. Tables are the dicts in its `__dict__` that hold hooks."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.own_class: type = type(owner)
        self.library_class: type | None = None
        """where the library has given it another"""
        self.before = {key: dict(value) if _is_table(key, value) else value for key, value in vars(owner).items()}
        self.attributes: dict[str, tuple[Any, Any]] = {}
        """name → (what was there, what is there now)"""
        self.front: dict[str, Entries] = {}
        """table → entries that the library put before those that were there"""
        self.back: dict[str, Entries] = {}

    def record(self) -> None:
        """Note what the library has added."""
        self.library_class = None if type(self.owner) is self.own_class else type(self.owner)
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
        if self.library_class is not None:
            self.own_class, self.owner.__class__ = type(self.owner), self.library_class


class LibraryAttachments:
    """What a library puts on several objects. Made before the library does its work."""

    def __init__(self, owners: Iterable[Any], kind: type[Attachment] = Attachment) -> None:
        self.attachments = [kind(owner) for owner in {id(owner): owner for owner in owners}.values()]
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
