"""Opens a parcel: all of it is made and understood before anything of the receiver's is touched. Then
`commit` puts it in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from nbtrain.base.errors import CannotTravel, text_of
from nbtrain.exchange.gc_paused import gc_paused
from nbtrain.exchange.graph import edit_in_place
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds import dispatch, python_module_state
from nbtrain.exchange.kinds.base import MISSING, Compound, EditTwin, MakeTwin, Node, ParcelContent, Receiver, Ref

Buffers = Callable[[int], memoryview]

MAKEABLE = "make it inside the cell, or give its class __getstate__ and __setstate__ that fit together"
HASHES = 1
"""`Kind.put_order` of dicts and sets, which hash their elements"""


class Unmakeable(CannotTravel):
    """An object that could be packed cannot be made here; nothing of the receiver's was touched."""

    def __init__(self, name: str, key: int, why: str, instead: str) -> None:
        """`name`: one that leads to it, if any does."""
        led = f"what {name} leads to" if name else "an object without a name"
        super().__init__(f"{led} was packed but cannot be made again: {why}; {instead}")
        self.key, self.why, self.instead = key, why, instead
        self.reason = f"{name or led}: {why}"


class _NotYet(LookupError):
    """There is no object under a key yet."""


class OpenedParcel(Receiver):
    """One parcel, opened. Raises `CannotTravel` for an object that cannot be made here."""

    table: ObjectTable

    @gc_paused
    def __init__(
        self,
        table: ObjectTable,
        namespace: dict[str, Any],
        content: ParcelContent,
        buffers: Buffers,
        device: Callable[[str], str] = str,
        renew: Callable[[int, int], bool] = lambda where, address: False,
        lenient: bool = False,
    ) -> None:
        self.table = table
        self.namespace = namespace
        self.buffer = buffers
        self.device = device
        self.renew = renew
        self.written: dict[int, memoryview] = {}
        self.lenient = lenient
        """leave an object of the receiver's as it is where its class refuses the change"""
        self.left: list[str] = []
        """sentences about those"""
        self._content = content
        self._made: dict[int, Node] = {}
        self._met: dict[int, Any] = {}
        """keys of objects of the receiver's that take over what was made (`edit_in_place.py`) → what was made"""
        self._puts: list[EditTwin] = [record for record in content.records if type(record) is EditTwin]
        self._filled = False
        self._make_all([r for r in content.records if type(r) is MakeTwin and (r.anew or r.key not in table.nodes)])
        self._own: list[EditTwin] = []
        new: list[EditTwin] = []
        for put in self._puts:
            # A new tensor may show memory that is the receiver's own.
            own = put.key not in self._made or put.key in self._met or self.node(put.key).kind.leaf
            (self._own if own else new).append(put)
        late = {name: value for name, value in content.names.items() if _hashes(value)}
        self.names = {name: self.decode(value) for name, value in content.names.items() if name not in late}
        self._fill(new)
        self.names |= {name: self.decode(value) for name, value in late.items()}

    # -- what kinds call -----------------------------------------------------------------

    def node(self, key: int) -> Node:
        node = self._made.get(key) or self.table.nodes.get(key)
        if node is None:
            raise _NotYet(key)
        return node

    def twin(self, key: int) -> Any:
        return self.node(key).obj

    def whole_twin(self, key: int) -> Any:
        if key in self._made and not self._made[key].kind.whole and not self._filled:
            raise _NotYet(key)
        return self.twin(key)

    def decode(self, value: Any) -> Any:
        kind = type(value)
        if kind is Ref:
            return self.node(value.key).obj
        if kind is Compound:
            return dispatch.kind_named(value.kind).join(*map(self.decode, value.parts))
        return value

    # -- what the session calls ----------------------------------------------------------

    @gc_paused
    def commit(self) -> list[Node]:
        """Edit the receiver's own objects. Returns the nodes that are new or changed."""
        table = self.table
        touched: dict[int, Node] = {}
        for key, made in self._made.items():
            node = table.nodes.get(key)
            if node is None:
                table.adopt(made)
                node = made
            else:
                table.replace(node, made.obj, made.kind)
                node.seen, node.fixed = made.seen, made.fixed
            touched[key] = node
        for key, made in self._met.items():
            edit_in_place.fill(touched[key], made)
        for put in sorted(self._own, key=self._put_order):
            node = table.nodes[put.key]
            try:
                self._attempt(put.key, node.kind.put, node, put.state, self)
            except Unmakeable as error:
                if not self.lenient:
                    raise
                self.left.append(error.reason)
                node.seen = None  # the sender's is another now, and gets this one's state again
            else:
                touched[put.key] = node
        for put in self._puts:
            if put.key in touched and not touched[put.key].kind.leaf:
                touched[put.key].kind.settle(touched[put.key])
        table.bulk.settle(self.written)
        return list(touched.values())

    # -- inside --------------------------------------------------------------------------

    def _make_all(self, makes: list[MakeTwin]) -> None:
        """Make the new objects. Those that run code of classes in this parcel wait until the classes are filled, as far
        as possible."""
        late = [record for record in makes if not self._make(record)]
        states: dict[int, Any] = {}
        if late:
            puts = [put for put in self._puts if put.key in self._made]
            states = {put.key: put.state for put in sorted(puts, key=self._put_order)}
        for key, state in states.items():
            self._fill_early(key, state)
        self._filled = True
        while late:
            waiting = []
            for record in late:
                if not self._make(record):
                    waiting.append(record)
                else:
                    self._fill_early(record.key, next((p.state for p in self._puts if p.key == record.key), None))
            if len(waiting) == len(late):
                key, why = late[0].key, "it can only be made from objects that need it"
                raise Unmakeable(self._name_of(key), key, why, "make it inside the cell")
            late = waiting

    def _make(self, record: MakeTwin) -> bool:
        """Make one object. False: something that it is made of does not exist yet."""
        kind = dispatch.kind_named(record.kind)
        try:
            obj = self._attempt(record.key, kind.make, record.args, self)
        except _NotYet:
            return False
        own = MISSING
        if record.anew:
            own = edit_in_place.under_same_key(self.table.nodes.get(record.key), obj, kind)
        elif record.place is not None:
            own = edit_in_place.made_by_file(record.place, obj, kind, self.table)
        if own is not MISSING:
            self._met[record.key], obj = obj, own
        node = self._made[record.key] = Node(record.key, obj, kind)
        kind.made(node, record.args, self)
        return True

    def _fill_early(self, key: int, state: Any) -> None:
        node = self._made.get(key)
        if node is not None and key not in self._met and not node.kind.leaf and node.kind.put_order(node.obj) < 2:
            # It is filled again when everything exists; that something is missing now is no error.
            with contextlib.suppress(Exception):
                node.kind.put(node, state, self)

    def _fill(self, new: list[EditTwin]) -> None:
        added = {
            name: value
            for name, value in self.names.items()
            if name not in self.namespace and not name.startswith(python_module_state.MODULE)
        }
        self.namespace.update(added)  # functions that run now may need them
        try:
            todo, last = sorted(new, key=self._put_order), False
            while todo:
                waiting = [put for put in todo if not self._put(put, last)]
                last = len(waiting) == len(todo)
                todo = waiting
        except BaseException:
            for name in added:
                del self.namespace[name]
            raise

    def _put(self, put: EditTwin, last: bool) -> bool:
        """Fill a new object. False: an element that it hashes is not filled yet; where this is the `last` attempt it
        raises."""
        node = self._made[put.key]
        try:
            self._attempt(put.key, node.kind.put, node, put.state, self)
        except Unmakeable:
            if last or not (_hashes(put.state) or node.kind.put_order(node.obj) == HASHES):
                raise
            return False
        return True

    def _put_order(self, put: EditTwin) -> float:
        node = self.node(put.key)
        if node.kind.leaf:
            return 0
        order = node.kind.put_order(node.obj)
        return order or (HASHES / 2 if _hashes(put.state) else 0)

    def _name_of(self, key: int) -> str:
        """A name that leads to an object, for a sentence on it."""
        said: dict[int, list[Any]] = {}
        for record in self._content.records:
            said.setdefault(record.key, []).append(record.args if isinstance(record, MakeTwin) else record.state)
        known = [(name, node.ref) for name, value in [*self.namespace.items()] if (node := self.table.find(value))]
        for name, value in (*self._content.names.items(), *known):
            todo, seen = [*refs(value)], set[int]()
            while todo:
                if (at := todo.pop()) == key:
                    return name
                if at not in seen:
                    seen.add(at)
                    inside = said[at] if at in said else [node.ref for node in self.table.nodes[at].children]
                    todo += refs(inside)
        return ""

    def _attempt(self, key: int, act: Callable[..., Any], *args: Any) -> Any:
        """Call what may run user code: a `__setstate__`, a `__hash__`, whatever an object's own pickle calls."""
        try:
            return act(*args)
        except (CannotTravel, _NotYet):
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {text_of(error)}"
            instead = MAKEABLE if self.lenient else f"{MAKEABLE}; %distributed check says where it is"
            raise Unmakeable(self._name_of(key), key, why, instead) from error


def _hashes(encoded: Any) -> bool:
    """Whether this cannot be decoded before what it leads to is filled: a frozenset asks its elements for their hash,
    and those may hash what they hold."""
    if type(encoded) is Compound:
        inner = encoded.kind == "frozenset" and next(refs(encoded), None) is not None
        return inner or any(map(_hashes, encoded.parts))
    if type(encoded) in (tuple, list):
        return any(map(_hashes, encoded))
    return type(encoded) is dict and any(map(_hashes, encoded.values()))


def refs(encoded: Any) -> Iterator[int]:
    """Keys of all that it leads to."""
    if type(encoded) is Ref:
        yield encoded.key
    elif type(encoded) in (Compound, dict, list, tuple):
        parts = encoded.parts if type(encoded) is Compound else encoded
        for part in parts.values() if type(parts) is dict else parts:
            yield from refs(part)
