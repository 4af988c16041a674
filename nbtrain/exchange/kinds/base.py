"""What a kind is: how one sort of object is looked at, made on the other side, and edited in place."""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import pickle
import re
import types
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nbtrain.errors import CannotTravel

if TYPE_CHECKING:
    from nbtrain.exchange.graph.arrival import Arrival
    from nbtrain.exchange.graph.table import Node
    from nbtrain.exchange.graph.visit import Visit

ATOMS: set[type] = {
    type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented),
    types.ModuleType, re.Pattern, decimal.Decimal, fractions.Fraction, uuid.UUID,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
    pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath,
}  # fmt: skip
"""Types whose objects nobody can change: they travel as they are. Kinds of other libraries add theirs."""

NOTHING = object()
"""What `look` returns when it only remembered: the other side was told by the way the object is made."""


class Ref:
    """A node, inside what is sent."""

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return Ref, (self.key,)


class Later:
    """Bytes that are fetched when they are written: whoever has all of them at once has the whole model twice."""

    __slots__ = ("fetch", "nbytes", "of")

    def __init__(self, nbytes: int, fetch: Callable[[], memoryview], of: Any) -> None:
        self.nbytes = nbytes
        self.fetch = fetch
        self.of = of
        """what they are the content of"""


class Packed:
    """A tuple, a bound method, ...: an object that cannot be changed but may hold some that can."""

    __slots__ = ("kind", "parts")

    def __init__(self, kind: str, parts: tuple[Any, ...]) -> None:
        self.kind = kind
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, (self.kind, self.parts)


def keys_in(value: Any) -> Iterator[int]:
    """Of the nodes that an encoded value refers to."""
    if type(value) is Ref:
        yield value.key
    elif type(value) is Packed:
        for part in value.parts:
            yield from keys_in(part)


@dataclass(slots=True)
class Make:
    """The other side makes a twin."""

    key: int
    kind: str
    args: Any
    anew: bool = False
    """the receiver has one, which cannot be edited: it is to have another instead"""
    place: Any = None
    """where the file of a local module has made it: the receiver's own execution of it has made one, too"""


@dataclass(slots=True)
class Put:
    """The other side edits its twin."""

    key: int
    state: Any


_OF_A_HANDLE = frozenset(("type_name", "text", "kept", "holds", "lost", "fetch"))


class Handle:
    """An object that stays on the ranks: it cannot travel, it is too large, or it was to be kept there.

    In a cell that runs on the ranks the name means the object itself.
    """

    def __init__(self, type_name: str, text: str, kept: bool) -> None:
        self.type_name = type_name
        self.text = text
        self.kept = kept
        """it could travel, and so it is worth something: nobody lets go of it unasked"""
        self.holds: list[Any] = []
        """the notebook's own objects that are in it"""
        self.lost: set[int] = set()
        """ranks that were replaced since: the new ones do not have it"""
        self.fetch: Callable[[bool], dict[int, Any]] | None = None
        """brings copies, by rank, from the lead or from all; None: the ranks that had the object are gone"""

    def pull(self) -> Any:
        """A copy of what the first rank has. Objects of the notebook's that it holds are the notebook's own."""
        (value,) = self._fetched(False).values()
        return value

    def per_rank(self) -> dict[int, Any]:
        """A copy of what each rank has."""
        return self._fetched(True)

    def _fetched(self, everybody: bool) -> dict[int, Any]:
        if self.fetch is None:
            raise CannotTravel(GONE)
        return self.fetch(everybody)

    def __copy__(self) -> Handle:
        """What it stands for exists once."""
        return self

    def __deepcopy__(self, memo: Any) -> Handle:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickle.PicklingError(
            f"this {self.type_name} lives on the ranks, and a handle for it means nothing elsewhere: pickle what "
            ".pull() brings"
        )

    def __repr__(self) -> str:
        if self.fetch is None:
            return f"<{self.type_name} on ranks that are gone: {self.text}>"
        return f"<{self.type_name} on the ranks: {self.text}{'; .pull() brings a copy home' if self.kept else ''}>"

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OF_A_HANDLE:  # nobody would ever see it
            raise AttributeError(
                f"this {self.type_name} lives on the ranks, and here is a handle for it: set .{name} in a "
                "%%distributed cell, or on a copy that .pull() brings"
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what copy, pickle and displays ask for
            raise AttributeError(name)
        raise AttributeError(
            f"this {self.type_name} lives on the ranks, and here is a handle for it: use .{name} in a %%distributed "
            "cell, or bring a copy home with .pull()"
        )


REPLACED = "had to be started anew and does not have it any more; bring home what the others have with .pull()"
GONE = "the ranks that had what this handle stands for are gone; make it again"


class Kind:
    """One sort of object. Stateless; one instance serves all objects of the kind."""

    name: str
    sent_as: str | None = None
    """of which kind it is on the other side, if not of this one"""
    asks = False
    """True: made by asking one of its parts, which therefore must not be a handle"""
    compound = False
    """True: no identity of its own, it travels inside its holder (see `parts` and `join`)"""

    whole = False
    """True: what `shell` says is all of it; a new node needs no `look`"""

    constant = False
    """True: once made it cannot change, nor lead to what can: a walk passes it by"""
    leaf = False
    """True: holds no other nodes as a rule, so a walk looks at all of them together (see `Bulk`)"""
    late = False
    """True: looked at when everything else was"""
    lasting = False
    """True: found inside an opaque object, it is a node of its own and not something made up for the pickle"""

    def turn(self, obj: Any) -> int:
        """When it is put in place: 0 before what needs the hash of its elements (1), and that before what runs
        a class's own `__setstate__` (2), which may look at everything else."""
        return 0

    def identity(self, obj: Any) -> int:
        """What tells two objects apart: their address, but for things that Python wraps anew each time."""
        return id(obj)

    def shell(self, node: Node, walk: Visit) -> Any:
        """How the other side makes it, without what it holds. In the sender."""
        return None

    def make(self, args: Any, arrival: Arrival) -> Any:
        """The twin, from what `shell` said. In the receiver."""
        raise TypeError(f"{self.name} is not made on its own")

    def made(self, node: Node, args: Any, arrival: Arrival) -> None:
        """In the receiver: what both sides know now, where `args` say it."""

    def look(self, node: Node, walk: Visit) -> Any:
        """None when nothing changed since `node.seen`; else what it holds now, encoded, and `seen` renewed."""
        raise TypeError(f"{self.name} has no state")

    def put(self, node: Node, state: Any, arrival: Arrival) -> None:
        """Edit the twin so that it holds `state`."""
        raise TypeError(f"{self.name} cannot be edited")

    def settle(self, node: Node) -> None:
        """After everything of a parcel was put in place."""

    def parts(self, obj: Any) -> tuple[Any, ...]:
        raise TypeError(self.name)

    def join(self, parts: tuple[Any, ...]) -> Any:
        raise TypeError(self.name)
