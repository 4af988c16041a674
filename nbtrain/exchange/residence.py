"""Who holds what: one side's view of the object graph that notebook and ranks share.

Every object with an identity of its own (a list, a dict, a module, a tensor, a function, an instance)
is a *node*: it has a key that both sides know, and each side has its own object under that key. What a
node looked like when both sides agreed is remembered (`seen`), so a walk below some names finds

    new nodes       the other side makes them          Make(key, kind, how to make it)
    changed nodes   the other side edits its own       Put(key, what it holds now)
    all the rest    costs a look, and nothing is sent

The walk is the same in both directions: going out it finds what the notebook changed between cells,
coming home it finds what the cell changed. What it sends is edited *into* the receiver's objects, so
identity, aliases and cycles hold on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain.errors import CannotTravel
from nbtrain.exchange import kinds
from nbtrain.exchange.kinds.base import ATOMS, Handle, Kind, Make, Packed, Put, Ref


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
        self.memo: Any = (0, b"")
        """whatever makes the kind's next look cheaper"""
        self.walk: Any = None
        """the mark of the last walk that met it"""
        self.via: Node | str | None = None


class Table:
    """key ⇄ object, on one side. Holds its objects: `keep` lets go of what no name leads to any more."""

    def __init__(self, first_key: int, step: int = 1) -> None:
        self.nodes: dict[int, Node] = {}
        self.by_id: dict[int, Node] = {}
        self._next = first_key
        self._step = step

    def new_key(self) -> int:
        self._next += self._step
        return self._next

    def add(self, key: int, obj: Any, kind: Kind) -> Node:
        node = Node(key, obj, kind)
        self.nodes[key] = node
        self.by_id[kind.identity(obj)] = node
        return node

    def replace(self, node: Node, obj: Any) -> None:
        """The same key now means another object: kinds that cannot be edited in place."""
        self.by_id.pop(node.kind.identity(node.obj), None)
        node.obj = obj
        self.by_id[node.kind.identity(obj)] = node

    def find(self, obj: Any) -> Node | None:
        node = self.by_id.get(id(obj))
        return node if node is not None and node.obj is obj else None

    def drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            node = self.nodes.pop(key, None)
            if node is not None:
                self.by_id.pop(node.kind.identity(node.obj), None)
                # Another node may still say that it was met behind this one.
                node.obj = node.seen = node.memo = node.via = node.fixed = None
                node.children = []

    def unreachable(self, roots: Iterable[Any]) -> list[int]:
        """Keys that none of these objects leads to."""
        todo = [node for node in map(self.find, roots) if node is not None]
        reached = {node.key for node in todo}
        while todo:
            node = todo.pop()
            for child in (*node.children, *(node.fixed or ())):
                if child.key not in reached:
                    reached.add(child.key)
                    todo.append(child)
        return [key for key in self.nodes if key not in reached]


@dataclass(slots=True)
class Culprit:
    """An object that cannot travel, and the nodes that lead to it."""

    obj: Any
    reason: str
    trail: list[Any]
    """the name first, then each object on the way"""


@dataclass(slots=True)
class Cargo:
    """What a walk found, ready to be packed."""

    records: list[Make | Put] = field(default_factory=list)
    buffers: list[memoryview] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    """name → encoded value"""


class Walk:
    """One pass over what hangs below some names."""

    def __init__(self, table: Table, namespace: dict[str, Any], *, quiet: bool = False, keep_home: bool = False) -> None:
        self.table = table
        self.namespace = namespace
        self.cargo = Cargo()
        self.quiet = quiet
        """only remember how things are: nothing is sent, no key is given"""
        self.keep_home = keep_home
        """coming home: what cannot travel stays where it is, behind a handle"""
        self.culprits: list[Culprit] = []
        self.stayed: list[Culprit] = []
        self.visited: list[Node] = []
        self._queue: list[Node] = []
        self.added: list[Node] = []
        self._looked: list[tuple[Node, Any, list[Node]]] = []
        self._token = object()
        """marks the nodes that were met; a mark that were the walk itself would keep all it saw alive"""
        self._replaced: set[int] = set()
        self.made_anew: set[int] = set()
        """keys whose objects could not be edited and were made anew"""
        self.remake: set[int] = set()
        """keys that some receiver lacks: they are made once more"""
        self._holder: Node | str = ""
        self.children: list[Node] = []

    # -- what kinds call -----------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """An atom as it is, a node as its reference, a tuple piece by piece."""
        if type(value) in ATOMS:
            return value
        node = self.table.by_id.get(id(value))
        if node is None or node.obj is not value:
            kind = kinds.kind_of(value, self.namespace)
            if kind is None:
                return value
            if kind.compound:
                return Packed(kind.name, tuple(map(self.encode, kind.parts(value))))
            node = self.table.by_id.get(kind.identity(value))
            if node is None:
                if self.quiet:
                    return None
                try:
                    node = self._add(value, kind)
                except CannotTravel as error:
                    return self._cannot(value, str(error))
        self.children.append(node)
        if self.remake and node.key in self.remake:
            self.remake.discard(node.key)
            self._shell(node)
            node.seen = node.seen if node.kind.whole else None
        if node.walk is not self._token:
            node.walk = self._token
            node.via = self._holder
            self._queue.append(node)
        return node.ref

    def buffer(self, data: memoryview) -> int:
        """Bytes that go beside the pickle; returns where the other side finds them."""
        self.cargo.buffers.append(data)
        return len(self.cargo.buffers) - 1

    # -- what the session calls ----------------------------------------------------------

    def name(self, name: str, value: Any) -> None:
        self._holder, self.children = name, []
        self.cargo.names[name] = self.encode(value)
        self._drain()

    def finish(self) -> Cargo:
        """Holders of objects that had to be made anew are sent too, since they hold another object now."""
        while self._replaced:
            replaced, self._replaced = self._replaced, set()
            for node in list(self.visited):
                if any(child.key in replaced for child in node.children):
                    node.seen = None
                    self._look(node)
            self._drain()
        return self.cargo

    def undo(self) -> None:
        """Nothing was sent: what this walk learned is not what the other side has."""
        for node, _, _ in self._looked:
            node.seen = None
        self.table.drop([node.key for node in self.added])
        for node in self.table.nodes.values():
            if node.walk is self._token:
                node.children = [c for c in node.children if c.key in self.table.nodes]

    # -- inside --------------------------------------------------------------------------

    def _add(self, value: Any, kind: Kind) -> Node:
        node = self.table.add(self.table.new_key(), value, kind)
        self.added.append(node)
        node.via = self._holder
        try:
            self._shell(node)
        except BaseException:
            self.table.drop([node.key])
            self.added.remove(node)
            raise
        return node

    def _shell(self, node: Node) -> None:
        outer, self._holder = self._holder, node
        held, self.children = self.children, []
        try:
            made = node.kind.shell(node, self)
            node.fixed = self.children
        finally:
            self._holder, self.children = outer, held
        self.cargo.records.append(Make(node.key, node.kind.name, made))
        if node.kind.whole:
            node.walk = self._token

    def _drain(self) -> None:
        queue, visited = self._queue, self.visited
        while queue:
            node = queue.pop()
            visited.append(node)
            self._look(node)

    def _look(self, node: Node) -> None:
        before, held = node.seen, node.children
        self._holder, self.children = node, []
        try:
            state = node.kind.look(node, self)
        except CannotTravel as error:
            self._cannot(node.obj, str(error), inside=True)
            return
        if state is None:
            if node.children:
                self._enqueue(node, node.children)
            if node.fixed:
                self._enqueue(node, node.fixed)
            return
        if node.fixed:
            self._enqueue(node, node.fixed)
        node.children = self.children
        self._looked.append((node, before, held))
        if self.quiet:
            return
        if type(state) is Make:
            self.cargo.records.append(state)
            self._replaced.add(node.key)
            self.made_anew.add(node.key)
        elif state is not kinds.NOTHING:
            self.cargo.records.append(Put(node.key, state))

    def _enqueue(self, holder: Node, nodes: list[Node]) -> None:
        for node in nodes:
            if node.walk is not self._token:
                node.walk = self._token
                if not node.kind.constant:
                    node.via = holder
                    self._queue.append(node)

    def _cannot(self, value: Any, reason: str, inside: bool = False) -> Any:
        culprit = Culprit(value, reason, [*self._trail(self._holder), *([] if inside else [value])])
        if not self.keep_home:
            self.culprits.append(culprit)
            return None
        self.stayed.append(culprit)
        if inside:
            return None
        handle = kinds.kind_named("handle")
        node = self.table.add(self.table.new_key(), value, handle)
        self.added.append(node)
        self.children.append(node)
        node.walk = self._token
        self.cargo.records.append(Make(node.key, "handle", handle.shell(node, self)))
        return node.ref

    def _trail(self, holder: Node | str | None) -> list[Any]:
        trail: list[Any] = []
        seen: set[int] = set()
        while isinstance(holder, Node) and holder.key not in seen:
            seen.add(holder.key)
            trail.append(holder.obj)
            holder = holder.via
        if isinstance(holder, str):
            trail.append(holder)
        return trail[::-1]


class Arrival:
    """A parcel being opened: all of it is made and understood before anything of the receiver's is touched."""

    def __init__(
        self,
        table: Table,
        namespace: dict[str, Any],
        cargo: Cargo,
        buffers: Callable[[int], memoryview],
        device: Callable[[str], str] = str,
    ) -> None:
        self.table = table
        self.namespace = namespace
        self.buffer = buffers
        self.device = device
        """where a tensor that was on this device is to live here"""
        self.notes: list[str] = []
        self._made: dict[int, tuple[Kind, Any, Any]] = {}
        self._puts: list[tuple[int, Any]] = []
        for record in cargo.records:
            if type(record) is Make:
                if record.key in table.nodes and not record.anew:
                    continue  # made for somebody else
                kind = kinds.kind_named(record.kind)
                self._made[record.key] = kind, kind.make(record.args, self), record.args
            else:
                self._puts.append((record.key, record.state))
        for key, _ in self._puts:
            self.twin(key)
        self.names = {name: self.decode(value) for name, value in cargo.names.items()}

    def twin(self, key: int) -> Any:
        """This side's object for a key."""
        if key in self._made:
            return self._made[key][1]
        return self.table.nodes[key].obj

    def decode(self, value: Any) -> Any:
        kind = type(value)
        if kind is Ref:
            return self.twin(value.key)
        if kind is Packed:
            return kinds.kind_named(value.kind).join(tuple(map(self.decode, value.parts)))
        return value

    def commit(self) -> list[Node]:
        """Edit the receiver's own objects. Returns the nodes that are new or changed."""
        touched: dict[int, Node] = {}
        for key, (kind, obj, args) in self._made.items():
            node = self.table.nodes.get(key)
            if node is None:
                node = self.table.add(key, obj, kind)
            else:
                self.table.replace(node, obj)
                node.kind = kind
            kind.made(node, args)
            touched[key] = node
        puts = [(touched.setdefault(key, self.table.nodes[key]), state) for key, state in self._puts]
        for node, state in sorted(puts, key=lambda put: put[0].kind.turn(put[0].obj)):
            node.kind.put(node, state, self)
        for node, _ in puts:
            node.kind.settle(node)
        return list(touched.values())


def remember(table: Table, namespace: dict[str, Any], nodes: Iterable[Node]) -> None:
    """Take how these nodes are now as what both sides have."""
    walk = Walk(table, namespace, quiet=True)
    for node in nodes:
        if node.fixed is None:
            walk._holder, walk.children = node, []
            node.kind.shell(node, walk)
            node.fixed = walk.children
        walk._holder, walk.children = node, []
        if node.kind.look(node, walk) is not None:
            node.children = walk.children


class _Members(Walk):
    """Lists what an object holds, in the order in which a walk meets it."""

    def __init__(self, table: Table, namespace: dict[str, Any]) -> None:
        super().__init__(table, namespace, quiet=True)
        self.found: list[Any] = []

    def encode(self, value: Any) -> Any:
        if type(value) not in ATOMS:
            kind = kinds.kind_of(value, self.namespace)
            if kind is not None and kind.compound:
                for part in kind.parts(value):
                    self.encode(part)
            elif kind is not None:
                self.found.append(value)
        return None


Way = tuple[int | str, bool, int, int]
"""How to come to an object: a key or name, whether among what it is made of, which one, of how many."""


class Ways:
    """How to come to objects that the other ranks made for themselves when the lead made its own."""

    def __init__(self, table: Table, namespace: dict[str, Any]) -> None:
        self.table = table
        self.namespace = namespace
        self._members: dict[tuple[int | str, bool], list[Any]] = {}

    def to(self, node: Node) -> Way | None:
        holder = node.via
        if holder is None:
            return None
        where = holder.key if isinstance(holder, Node) else holder
        for fixed in (False, True):
            members = self.members(where, fixed)
            for index, obj in enumerate(members):
                if node.kind.identity(obj) == node.kind.identity(node.obj):
                    return where, fixed, index, len(members)
        return None

    def follow(self, way: Way) -> Any:
        """The object at the end of it, or None."""
        where, fixed, index, count = way
        members = self.members(where, fixed)
        return members[index] if len(members) == count else None

    def members(self, where: int | str, fixed: bool) -> list[Any]:
        known = self._members.get((where, fixed))
        if known is None:
            walk = _Members(self.table, self.namespace)
            if isinstance(where, str):
                if where in self.namespace and not fixed:
                    walk.encode(self.namespace[where])
            elif where in self.table.nodes:
                node = self.table.nodes[where]
                seen, node.seen = node.seen, None
                (node.kind.shell if fixed else node.kind.look)(node, walk)
                node.seen = seen
            known = self._members[where, fixed] = walk.found
        return known


def find_all(table: Table, names: Mapping[str, Any], wanted: tuple[type, ...]) -> dict[str, Any]:
    """Every object of these types below some names, under an address a person understands; of a model, not its parts."""
    found: dict[str, Any] = {}
    parts: set[int] = set()
    seen: set[int] = set()
    todo: list[tuple[str, Node]] = []
    for name, value in names.items():
        node = table.find(value)
        if node is not None:
            todo.append((name, node))
    todo.reverse()
    while todo:
        address, node = todo.pop()
        if node.key in seen:
            continue
        seen.add(node.key)
        if isinstance(node.obj, wanted) and id(node.obj) not in parts:
            found[address] = node.obj
            if hasattr(node.obj, "modules"):
                parts.update(map(id, node.obj.modules()))
        if node.kind.whole:
            continue
        todo.extend((node.kind.address(address, node.obj, child.obj), child) for child in reversed(node.children))
    return found


__all__ = ["Arrival", "Cargo", "Culprit", "Handle", "Node", "Table", "Walk", "Way", "Ways", "find_all", "remember"]
