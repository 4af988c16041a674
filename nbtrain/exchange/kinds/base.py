"""What a kind is: how one sort of object is looked at, made on the other side, and edited in place; and what it sees of
the side that sends and of the side that receives."""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import pickle
import re
import sys
import types
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nbtrain.base.errors import CannotTravel

ATOMS: set[type] = {
    type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), type(NotImplemented),
    types.ModuleType, re.Pattern, decimal.Decimal, fractions.Fraction, uuid.UUID,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone,
    pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath,
}  # fmt: skip
"""Types whose objects nobody can change: they travel as they are."""


def learn_atoms() -> None:
    """Add the types of torch and numpy whose objects nobody can change, once those are imported."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "nn") and torch.dtype not in ATOMS:
        ATOMS.update((torch.dtype, torch.device, torch.layout, torch.memory_format))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "generic") and numpy.generic not in ATOMS:
        ATOMS.update(t for t in vars(numpy).values() if isinstance(t, type) and issubclass(t, numpy.generic))


MISSING = object()
NOTHING = object()
"""What `look` returns when it only remembered: the other side was told by the way the object is made."""


class Ref:
    """Stands for a node in what is sent."""

    __slots__ = ("key",)

    def __init__(self, key: int) -> None:
        self.key = key

    def __reduce__(self) -> tuple[Any, ...]:
        return Ref, (self.key,)


class Later:
    """Bytes that are fetched only when they are written, so that the whole model is never in memory twice."""

    __slots__ = ("fetch", "nbytes", "of")

    def __init__(self, nbytes: int, fetch: Callable[[], memoryview], of: Any) -> None:
        self.nbytes = nbytes
        self.fetch = fetch
        self.of = of
        """what they are the content of"""


class Compound:
    """Stands for an object without a node, such as a tuple or a bound method: its kind, and its encoded parts."""

    __slots__ = ("kind", "parts")

    def __init__(self, kind: str, parts: tuple[Any, ...]) -> None:
        self.kind = kind
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return Compound, (self.kind, self.parts)


def keys_in(value: Any) -> Iterator[int]:
    """Keys of the nodes that an encoded value refers to."""
    if type(value) is Ref:
        yield value.key
    elif type(value) is Compound:
        for part in value.parts:
            yield from keys_in(part)


@dataclass(slots=True)
class MakeTwin:
    """Tells the other side to make a twin."""

    key: int
    kind: str
    args: Any
    anew: bool = False
    """the receiver has a twin that cannot be edited, and makes another instead"""
    place: Any = None
    """where the file of a local module made it, and so the receiver's own execution of the file, too"""


@dataclass(slots=True)
class EditTwin:
    """Tells the other side to edit its twin."""

    key: int
    state: Any


@dataclass(slots=True)
class ParcelContent:
    """What one parcel says, before it is packed and after it is opened."""

    records: list[MakeTwin | EditTwin] = field(default_factory=list)
    buffers: list[memoryview | Later] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    """name → encoded value"""
    places: dict[int, int] = field(default_factory=dict)
    """buffer → key of the memory that it is all of: the readers may have it mapped from last time"""
    rewritten: set[int] = field(default_factory=set)
    """keys of memory that was written again where readers have it mapped, by packing"""


OPTION = "--"
"""Prefix of the names under which the strategy's options travel; no Python name begins so."""

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
        """A copy is the handle itself: what it stands for exists once."""
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

    def __iter__(self) -> Any:
        raise TypeError(
            f"this {self.type_name} lives on the ranks, and here is a handle for it: go through it in a %%distributed "
            "cell, or make a list of it there, list(…), which comes home"
        )

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
            f"cell{', or bring a copy home with .pull()' if self.kept else ', and have that return what you need'}"
        )


RANKS_REPLACED = "had to be started anew and no longer has it; bring home what the others have with .pull()"
GONE = "the ranks that had what this handle stands for are gone; make it again"


class Kind:
    """One sort of object. Stateless; one instance serves all objects of the kind."""

    name: str
    sent_as: str | None = None
    """of which kind it is on the other side, if not of this one"""
    asks = False
    """True: made by asking one of its parts, which therefore must not be a handle"""
    compound = False
    """True: no identity of its own (see `CompoundKind`)"""
    parts: Callable[[Any], tuple[Any, ...]]
    join: Callable[..., Any]
    """of a compound: what it is made of, and how it is made of them on the other side"""
    whole = False
    """True: `make_args` says everything; a new node needs no `look`"""

    constant = False
    """True: once made it cannot change, nor lead to what can: a walk passes it by"""
    leaf = False
    """True: holds no other nodes as a rule, so a walk looks at all of them together (see `BulkCompare`)"""
    late = False
    """True: looked at when everything else was"""
    lasting = False
    """True: found inside an opaque object, it is a node of its own and not something made up for the pickle"""

    def put_order(self, obj: Any) -> int:
        """When its twin is filled: 0 before what needs the hash of its elements (1), and that before what runs the
        `__setstate__` of its class (2), which may look at everything else."""
        return 0

    def identity(self, obj: Any) -> int:
        """What tells two objects apart: their address, but for things that Python wraps anew each time."""
        return id(obj)

    def make_args(self, node: Node, walk: Sender) -> Any:
        """In the sender: what `make` needs, without what the object holds."""
        return None

    def make(self, args: Any, receiver: Receiver) -> Any:
        """In the receiver: the twin, from what `make_args` said."""
        raise TypeError(f"{self.name} is not made on its own")

    def made(self, node: Node, args: Any, receiver: Receiver) -> None:
        """In the receiver, after `make`: note what both sides know now, where `args` say it."""

    def look(self, node: Node, walk: Sender) -> Any:
        """In the sender: None when nothing changed since `node.seen`; else renew `seen`, and return what the object
        holds, encoded. Objects in it are compared by identity (`containers.same_items`), so `seen` has them themselves,
        not encoded: that may be made anew each time. They are looked at also where this returns None."""
        return None

    def put(self, node: Node, state: Any, receiver: Receiver) -> None:
        """In the receiver: edit the twin so that it holds `state`."""
        raise TypeError(f"{self.name} cannot be edited")

    def settle(self, node: Node) -> None:
        """In the receiver, after everything of a parcel was put in place. Not asked of leaves."""


class CompoundKind(Kind):
    """An object without an identity of its own: a tuple, a bound method. It travels as its parts, inside its holder."""

    compound = True

    def __init__(
        self, name: str, parts: Callable[[Any], tuple[Any, ...]], join: Callable[..., Any], *, asks: bool = False
    ) -> None:
        self.name, self.parts, self.join, self.asks = name, parts, join, asks


class Node:
    """One object that has a twin on the other side."""

    __slots__ = ("children", "fixed", "key", "kind", "memo", "obj", "ref", "seen", "via", "walk")

    def __init__(self, key: int, obj: Any, kind: Kind) -> None:
        self.key = key
        self.obj = obj
        self.kind = kind
        self.ref = Ref(key)
        self.seen: Any = None
        """what `kind.look` remembered; None: nobody knows what the other side has"""
        self.children: list[Node] = []
        """nodes that its present state refers to"""
        self.fixed: list[Node] | None = None
        """nodes it is made of: the class of an instance, the storage of a tensor"""
        self.memo: Any = None
        """whatever makes the kind's next look cheaper"""
        self.walk: Any = None
        """the stamp of the last walk that came by; not the walk itself, which holds what it sent"""
        self.via: Node | str | None = None


@dataclass(slots=True)
class Stay:
    """Why a new object does not come home."""

    reason: str
    kept: bool
    """it could"""


class Nodes(Protocol):
    """The nodes of one side (`exchange/graph/object_table.py`)."""

    nodes: dict[int, Node]
    apart: dict[int, Any]
    """id → the tensor of that id, in pieces (`exchange/kinds/split_tensors.py`)"""

    def find(self, obj: Any) -> Node | None: ...

    def replace(self, node: Node, obj: Any, kind: Kind) -> None: ...


class Sender(ABC):
    """Asks kinds what objects hold (`exchange/graph/held_objects.py`).

    A kind calls `encode` for each object that its own leads to, in an order that is always the same.
    """

    table: Nodes
    namespace: dict[str, Any]
    quiet: bool
    """only how things are is asked: nothing is sent, no key is given"""
    reads: bool
    """also when quiet, the bytes of tensors and arrays are looked at"""
    keep_home: bool
    """coming home: what cannot travel stays where it is, behind a handle"""
    staying: dict[int, Stay]
    """coming home: id of a new object → why it is to stay behind a handle"""
    checksums: Mapping[int, int]
    """coming home: id of a large tensor → its checksum, which was asked for just before"""
    arrays: Any
    """where the arrays lie that a tensor may have been made of, once one asked"""
    children: list[Node]
    """nodes met while one object is looked at"""
    kind_of: Callable[..., Kind | None]
    """which kind another object is (`kinds/dispatch.py`)"""

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """How the holder's state names it."""

    @abstractmethod
    def buffer(self, data: memoryview | Later, place: Node | None = None) -> int:
        """Bytes that go beside the pickle; returns where the other side finds them."""

    @abstractmethod
    def is_new(self, node: Node) -> bool:
        """Whether the other side gets it, with its bytes, from this visit."""

    @abstractmethod
    def known_inside(self, obj: Any) -> list[Node]:
        """The first objects on every way into this one that the other side knows."""


class Receiver(ABC):
    """Makes and edits objects as a parcel says (`exchange/graph/open_parcel.py`)."""

    table: Nodes
    namespace: dict[str, Any]
    buffer: Callable[[int], memoryview]
    device: Callable[[str], str]
    """where a tensor that was on this device is to live here"""
    renew: Callable[[int, int], bool]
    """whether the memory at an address shows the sender's buffer, now that it was written again"""
    written: dict[int, memoryview]
    """key → bytes that were written into a small tensor; nothing else of it was changed"""

    @abstractmethod
    def node(self, key: int) -> Node:
        """This side's node for a key."""

    @abstractmethod
    def twin(self, key: int) -> Any:
        """This side's object for a key."""

    @abstractmethod
    def whole_twin(self, key: int) -> Any:
        """The same for an object's own pickle, which may run the twin's code at once."""

    @abstractmethod
    def decode(self, value: Any) -> Any:
        """The object that an encoded value names."""
