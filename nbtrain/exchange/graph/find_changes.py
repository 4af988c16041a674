"""Walks over the objects below some names, and finds what the other side lacks or has differently."""

from __future__ import annotations

import argparse
from argparse import SUPPRESS
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nbtrain.base.errors import CannotTravel, text_of
from nbtrain.exchange.gc_paused import gc_paused
from nbtrain.exchange.graph.held_ids import holding_ids, holding_ids_inside
from nbtrain.exchange.graph.held_objects import ObjectVisitor
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds import dispatch, python_module_state
from nbtrain.exchange.kinds.base import (
    ATOMS,
    NOTHING,
    Compound,
    EditTwin,
    Handle,
    Kind,
    Later,
    MakeTwin,
    Node,
    ParcelContent,
    Ref,
)
from nbtrain.exchange.kinds.containers import LONG_CONSTANT, LONG_TEXT, is_long
from nbtrain.exchange.kinds.tensors import has_hooks, look_at_bytes

NOT_GIVEN = Compound("sentinel", (argparse, "SUPPRESS"))
"""Stands for `argparse.SUPPRESS`: Python asks whether a default is this very string."""


@dataclass(slots=True)
class Culprit:
    """An object that cannot travel, and the nodes that lead to it."""

    obj: Any
    reason: str
    trail: list[Any]
    """the name first, then each object on the way"""
    known: bool = False
    """both sides have it, and what changed in it cannot be told"""


class Walk(ObjectVisitor):
    """One walk. It adds new objects to the table and remembers what it saw; `undo` takes both back."""

    def __init__(
        self,
        table: ObjectTable,
        namespace: dict[str, Any],
        *,
        quiet: bool = False,
        reads: bool = False,
        keep_home: bool = False,
    ) -> None:
        super().__init__(table, namespace, quiet=quiet, keep_home=keep_home)
        self.reads = not quiet or reads
        self.content = ParcelContent()
        self.edits: list[tuple[Node, Any, Any]] = []
        """known objects that are not as they were seen: the node, what was seen before, how it is encoded now"""
        self.new_bytes = 0
        """in the buffers of new objects"""
        self.culprits: list[Culprit] = []
        self.stayed: list[Culprit] = []
        self.added: list[Node] = []
        self.made_anew: set[int] = set()
        """keys whose objects could not be edited and were made anew"""
        self.remake: set[int] = set()
        """keys that some receiver lacks: they are made once more"""
        self.loosened = False
        """some object holds another no longer"""
        self.holder: Node | str = ""
        self._stamp = object()
        self._queue: list[Node] = []
        self._leaves: list[Node] = []
        self._late: list[Node] = []
        self._looked: list[tuple[Node, Any, list[Node], list[Node] | None, Any]] = []
        self._replaced: set[int] = set()
        self._new: set[int] = set()

    # -- what kinds call -----------------------------------------------------------------

    def encode(self, value: Any) -> Any:  # noqa: C901  called for each value that travels
        """What is sent for a value: an atom itself, a reference to a node, the parts of a tuple."""
        cls = type(value)
        if cls in ATOMS and not ((cls is str or cls is bytes) and len(value) >= LONG_TEXT):
            return value if cls is not str or value is not SUPPRESS else NOT_GIVEN
        node = self.table.by_id.get(id(value))
        if node is None or node.obj is not value:
            kind = LONG_CONSTANT if cls in ATOMS else self.kind_of(value, self.namespace, self.table.apart)
            if kind is None:
                return value
            if self.staying and id(value) in self.staying:
                return self._stay(value, self._culprit(value, self.staying[id(value)].reason))
            if cls is tuple and is_long(value):
                kind = LONG_CONSTANT
            if kind.compound:
                try:
                    parts = kind.parts(value)
                except Exception as error:  # of a class of the user's
                    return self._cannot(value, _raised(error))
                encoded = tuple(map(self.encode, parts))
                if kind.asks and self.keep_home and any(type(p) is Ref and self._stays(p.key) for p in encoded):
                    return self._stay(value, self._culprit(value, "it is a method of what stays there"))
                return Compound(kind.name, encoded)
            node = self.table.by_id.get(kind.identity(value))
            if node is None:
                if self.quiet:
                    return None
                try:
                    node = self._add(value, kind)
                except Exception as error:  # of a class of the user's
                    return self._cannot(value, _raised(error))
        self.children.append(node)
        if self.remake and node.key in self.remake:
            self._make_again(node)
        if node.walk is not self._stamp:
            node.walk = self._stamp
            node.via = self.holder
            if node.kind.leaf:
                self._leaves.append(node)
            elif not node.kind.constant:
                (self._late if node.kind.late else self._queue).append(node)
        return node.ref

    def buffer(self, data: memoryview | Later, place: Node | None = None) -> int:
        if self.quiet:
            return 0
        self.content.buffers.append(data)
        where = len(self.content.buffers) - 1
        if type(self.holder) is Node and self.holder.key in self._new:
            self.new_bytes += data.nbytes
        if place is not None:
            self.content.places[where] = place.key
        return where

    def pass_by(self, value: Any) -> bool:
        """Do not look at what this object leads to. True: both sides know it."""
        node = self.table.find(value)
        todo = [] if node is None else [node]
        while todo:
            node = todo.pop()
            if node.walk is not self._stamp:
                node.walk = self._stamp
                todo += [*node.children, *(node.fixed or ())]
        return node is not None

    def met(self, node: Node) -> bool:
        return node.walk is self._stamp

    def is_new(self, node: Node) -> bool:
        return node.key in self._new

    # -- what the session calls ----------------------------------------------------------

    @gc_paused
    def name(self, name: str, value: Any) -> None:
        self.holder, self.children = name, []
        try:
            self.content.names[name] = self.encode(value)
            self._drain()
        except BaseException:
            self.undo()
            raise

    @gc_paused
    def finish(self) -> ParcelContent:
        """Everything found. Holders of objects that had to be made anew are sent too: they hold another object now."""
        while self._late:
            late, self._late = self._late, []
            for node in late:
                self._look(node)
            self._drain()
        while self._replaced:
            replaced, self._replaced = self._replaced, set()
            for node in [node for node in self.table.nodes.values() if node.walk is self._stamp]:
                if any(child.key in replaced for child in node.fixed or ()):
                    self._make(node, anew=True)
                    if not node.kind.whole:  # the receiver's new one is empty
                        node.seen = None
                        self._look(node)
                elif any(child.key in replaced for child in node.children):
                    node.seen = None
                    self._look(node)
            self._drain()
        if not (self.quiet or self.keep_home):
            self._refuse_ids()
        return self.content

    def _refuse_ids(self) -> None:
        by_id = self.table.by_id
        if self._looked or self.added:  # mostly not in a cell like the one before
            made = [node for node in self.added if node.kind.constant]
            known = holding_ids([*(node for node, *_ in self._looked), *made], by_id)
            inside = holding_ids_inside([(node, state) for node, _, state in self.edits], by_id)
            for node, reason in [*known, *inside]:
                self.culprits.append(Culprit(node.obj, reason, self.trail(node)))
        for name, reason in holding_ids_inside(self.content.names.items(), by_id):
            value = self.namespace.get(name)
            self.culprits.append(Culprit(value, reason, [name, value]))

    def settle(self) -> None:
        """What this walk learned stays: nothing of it is to be undone."""
        self._looked = []

    def undo(self) -> None:
        """Forget what this walk learned: nothing was sent, so the other side does not have it."""
        for node, before, children, fixed, memo in reversed(self._looked):
            node.seen, node.children, node.fixed, node.memo = before, children, fixed, memo
        self._looked = []
        self.table.drop([node.key for node in self.added])
        self.added = []
        rewritten = self.content.rewritten
        for node in self.table.nodes.values() if rewritten else ():
            if node.key in rewritten or any(child.key in rewritten for child in node.fixed or ()):
                node.seen = None

    def holders(self) -> tuple[int, ...]:
        """Keys of known objects that hold others than before."""
        looked = ((node, children) for node, _, children, *_ in self._looked if children is not node.children)
        return tuple(node.key for node, children in looked if _keys(children) != _keys(node.children))

    # -- inside --------------------------------------------------------------------------

    def _add(self, value: Any, kind: Kind) -> Node:
        node = self.table.add(self.table.new_key(), value, kind)
        self.added.append(node)
        node.via = self.holder
        self._new.add(node.key)
        try:
            self._make(node)
        except BaseException:
            self._new.discard(node.key)
            self.table.drop([node.key])
            self.added.remove(node)
            raise
        return node

    def _make(self, node: Node, anew: bool = False) -> None:
        """Send how the other side makes a node's object."""
        outer, self.holder = self.holder, node
        children, self.children = self.children, []
        before = node.seen, node.children, node.fixed, node.memo
        try:
            made = node.kind.make_args(node, self)
            self.loosened = self.loosened or _lost(node.fixed, self.children)
            node.fixed = self.children
        finally:
            self.holder, self.children = outer, children
        if anew:
            self._looked.append((node, *before))
            self._replaced.add(node.key)
            self.made_anew.add(node.key)
        place = python_module_state.place_of(node.kind, node.obj)
        self.content.records.append(MakeTwin(node.key, node.kind.sent_as or node.kind.name, made, anew, place))
        if node.kind.whole and node.seen is not None:
            node.walk = self._stamp

    def _make_again(self, node: Node) -> None:
        """Send a known object to ranks that lack it; the others ignore it, and learn from a look what changed."""
        self.remake.discard(node.key)
        self._new.add(node.key)
        seen = node.seen
        self._looked.append((node, seen, node.children, node.fixed, node.memo))
        self._make(node)
        node.seen = seen if node.kind.whole and node.seen is not None else None
        node.walk = None

    def _drain(self) -> None:
        queue, look = self._queue, self._look
        while queue or self._leaves:
            while queue:
                look(queue.pop())
            leaves, self._leaves = self._leaves, []
            doubtful, rewritten = self.table.bulk.changed(leaves) if self.reads else (leaves, [])
            for node in doubtful:
                look(node)
            for node in rewritten:
                self._look_at_bytes(node)
            self.table.bulk.looked()

    def _look_at_bytes(self, node: Node) -> None:
        """Look at a tensor of which nothing but the bytes can have changed: a model has hundreds, and this is quick."""
        if node.children or self.remake or has_hooks(node):
            return self._look(node)
        self.holder, before = node, node.seen
        state = look_at_bytes(node, self)
        for storage in node.fixed or ():
            storage.walk = self._stamp
        if state is not None:
            self._looked.append((node, before, node.children, node.fixed, node.memo))
            self.edits.append((node, before, state))
            if not self.quiet:
                self.content.records.append(EditTwin(node.key, state))

    def _look(self, node: Node) -> None:
        before, children, fixed, memo = node.seen, node.children, node.fixed, node.memo
        if self.quiet and node.kind is dispatch.kind_named("opaque"):  # to pickle it takes long
            return self._enqueue(node, [*children, *(fixed or ())])
        if self.remake and any(child.key in self.remake for child in children):
            node.seen = None  # who lacks the child holds something else in its place
        self.holder, self.children = node, []
        try:
            state = node.kind.look(node, self)
        except BaseException as error:
            node.seen, node.children, node.fixed, node.memo = before, children, fixed, memo
            if not isinstance(error, Exception):
                raise
            self._cannot(node.obj, _raised(error), inside=True)
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
        self.loosened = self.loosened or _lost(children, self.children) or _lost(fixed, node.fixed or [])
        self._looked.append((node, before, children, fixed, memo))
        if not self.reads:
            return
        self.edits.append((node, before, state))
        if self.keep_home:  # what it held until now may have changed first, and the other side may hold it elsewhere
            self._enqueue(node, children)
        if self.quiet:
            return
        if type(state) is MakeTwin:
            self.content.records.append(state)
            self._replaced.add(node.key)
            self.made_anew.add(node.key)
        elif state is not NOTHING:
            self.content.records.append(EditTwin(node.key, state))

    def _enqueue(self, holder: Node, nodes: list[Node]) -> None:
        """Of those that were dropped nothing is to be found. A holder here may still have one: its twin let go of it,
        as a `__setstate__` does that puts something of its own side in the place of what has arrived."""
        stamp = self._stamp
        for node in nodes:
            if node.walk is not stamp and node.obj is not None:
                node.walk = stamp
                kind = node.kind
                if kind.leaf:
                    node.via = holder
                    self._leaves.append(node)
                elif not kind.constant:
                    node.via = holder
                    (self._late if kind.late else self._queue).append(node)

    def _cannot(self, value: Any, reason: str, inside: bool = False) -> Any:
        if self.quiet:
            return None
        culprit = self._culprit(value, reason, inside)
        if not self.keep_home:
            self.culprits.append(culprit)
            return None
        if inside:
            self.stayed.append(culprit)
            return None
        return self._stay(value, culprit)

    def _culprit(self, value: Any, reason: str, inside: bool = False) -> Culprit:
        return Culprit(value, reason, [*self.trail(self.holder), *([] if inside else [value])], known=inside)

    def _stay(self, value: Any, culprit: Culprit) -> Any:
        """Send a handle for an object that stays here."""
        self.stayed.append(culprit)
        handle = dispatch.kind_named("handle")
        node = self.table.add(self.table.new_key(), value, handle)
        node.via = self.holder
        self.added.append(node)
        self.children.append(node)
        node.walk = self._stamp
        self._late.append(node)
        self.content.records.append(MakeTwin(node.key, "handle", handle.make_args(node, self)))
        return node.ref

    def _stays(self, key: int) -> bool:
        node = self.table.nodes[key]
        return node.kind.late and type(node.obj) is not Handle

    def trail(self, holder: Node | str | None) -> list[Any]:
        """The objects on the way from a name of the notebook to this holder."""
        trail: list[Any] = []
        seen: set[int] = set()
        while isinstance(holder, Node) and holder.key not in seen:
            seen.add(holder.key)
            trail.append(holder.obj)
            holder = holder.via
        if isinstance(holder, str):
            trail.append(holder)
        return trail[::-1]


@gc_paused
def remember(table: ObjectTable, namespace: dict[str, Any], nodes: Iterable[Node]) -> bool:
    """Note the present state of these nodes as what both sides have. True: one of them holds another no longer."""
    walk = Walk(table, namespace, quiet=True)
    loosened = False
    for node in nodes:
        try:
            if node.fixed is None:
                walk.holder, walk.children = node, []
                node.kind.make_args(node, walk)
                node.fixed = walk.children
            walk.holder, walk.children = node, []
            if node.kind.look(node, walk) is not None:
                loosened = loosened or _lost(node.children, walk.children)
                node.children = walk.children
        except Exception:  # code of the user's; who looks at it in order to send it says so
            node.seen = None
    return loosened


def _raised(error: Exception) -> str:
    """Why looking at an object failed: properties, `__getattr__`s and metaclasses of the user's may run, and raise."""
    if isinstance(error, MemoryError):
        raise error
    said = text_of(error)
    return said if isinstance(error, CannotTravel) else f"looking at it raised {type(error).__name__}: {said}"


def _keys(nodes: list[Node]) -> list[int]:
    return [node.key for node in nodes]


def _lost(before: list[Node] | None, now: list[Node]) -> bool:
    return bool(before) and not {node.key for node in before or ()} <= {node.key for node in now}
