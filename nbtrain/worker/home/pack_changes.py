"""What a cell changed, packed for the notebook; and what stays on the ranks behind a handle."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import nbtrain.base.humanize as humanize
from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.graph.rank_paths import RankPaths, by_value
from nbtrain.exchange.kinds import dispatch
from nbtrain.exchange.kinds.base import ATOMS, ParcelContent, Stay, learn_atoms
from nbtrain.exchange.kinds.checksum import checksum
from nbtrain.exchange.kinds.python_module_state import MODULE, ModuleState
from nbtrain.exchange.kinds.tensors import TENSOR
from nbtrain.exchange.parcel import HomeParcel, Packer, Parcel, fetched
from nbtrain.worker.home.edits_compared import numbers
from nbtrain.worker.home.rank_differences import number

if TYPE_CHECKING:
    import torch

    from nbtrain.worker.home.pieces import Pieces

KERNEL = -1
"""The reader of what goes home."""
LIMIT = 10**9
"""Bytes up to which what is new under a name comes home by itself."""
ASKED = "--keep"
MISSING = object()


@dataclass(slots=True)
class PackChanges:
    """One cell's way home. It can be packed again, with less, until the next cell comes."""

    table: ObjectTable
    namespace: dict[str, Any]
    known: list[str]
    """names that the notebook sent for this cell"""
    bound: list[str]
    """names that it assigned"""
    deleted: tuple[str, ...]
    keep: tuple[str, ...]
    limit: float
    before: dict[str, Any] = field(default_factory=dict)
    """what names held when the cell began: the notebook may have it elsewhere too, and the cell may have changed it"""
    modules: list[ModuleState] = field(default_factory=list)
    """those of which something is not as their files gave it"""
    _staying: dict[int, Stay] = field(default_factory=dict)
    _walk: Walk | None = None
    _checksums: dict[int, int] = field(default_factory=dict)
    """of large tensors, by id, since the cell has ended"""

    def values(self, weights: Callable[[], Container[int]] | None = None) -> list[tuple[str, int]]:
        """A number for what each name holds here. `weights`: as for `edited`."""
        handle = dispatch.kind_named("handle")
        names = [name for name in dict.fromkeys((*self.known, *self.bound)) if name in self.namespace]
        kept = {name: value for name in self.keep if not by_value(value := self.namespace.get(name))}
        ids = {id(node.obj) for node in self.table.nodes.values() if node.kind is handle}
        ids |= {id(value) for value in kept.values() if type(value) not in ATOMS}  # one text may be two on other ranks
        values = {name: self.namespace[name] for name in names if name not in kept}
        numbers_of_names = [
            (name, number(value, self.table, ids, self._checksums, weights)) for name, value in values.items()
        ]
        return numbers_of_names + [
            (MODULE + state.name, number(state.entries, self.table, ids)) for state in self.modules
        ]

    def look(self) -> None:
        """On a rank whose changes do not come home: find them, so that they can be compared with the lead's."""
        learn_atoms()
        self._walk, _ = self._look(packs=False)
        self._walk.settle()

    def edited(self, weights: Callable[[], Container[int]]) -> list[tuple[int, int]]:
        """A number for each known object that the cell has edited here. `weights`: ids of tensors that are compared
        elsewhere; asked for only where some tensor was edited."""
        if self._walk is None or not self._walk.edits:
            return []
        edits = numbers(self._walk, weights)
        self._walk.edits = []  # they would keep alive what the next line of the user's may let go
        return edits

    def rewritten(self) -> set[int]:
        """Ids of the tensors that the cell has edited here, and of those of which nobody has looked at all."""
        edits = self._walk.edits if self._walk is not None else ()
        return {id(node.obj) for node, _, _ in edits if node.kind is TENSOR} | self.table.apart.keys()

    def checksum(self, tensor: torch.Tensor) -> int:
        """Of what the tensor holds now. Most were read when the changes were looked for."""
        node = self.table.by_id.get(id(tensor))
        if node is None or node.kind is not TENSOR or node.seen is None or self._walk is None:
            return checksum(tensor)
        return node.seen[3] if self._walk.met(node) and node.seen[3] is not None else checksum(tensor)

    def pack(self, packer: Packer, pieces: Pieces | None = None) -> HomeParcel:
        """`pieces`: of models of which no rank has all; the others serve them."""
        with _writing(packer, pieces) as write:
            return self._pack(write)

    def _pack(self, write: Callable[[ParcelContent], Parcel]) -> HomeParcel:
        learn_atoms()
        bound = self.bound
        walk, weights = self._look()
        heavy = {name: size for name, size in weights.items() if name in bound and size > self.limit}
        for name, size in heavy.items():
            reason = f"it is {humanize.size(size)}, and up to {humanize.size(self.limit)} come by themselves"
            self._staying[id(self.namespace[name])] = Stay(f"{reason}; {name}.pull() brings it", True)
        if heavy:
            walk.undo()
            walk, _ = self._look()
        content = walk.finish()
        replaced = {key for key, value in content.names.items() if getattr(value, "key", None) in walk.made_anew}
        content.names = {n: v for n, v in content.names.items() if n in bound or n in replaced or n.startswith(MODULE)}
        ways = RankPaths(self.table, self.namespace)
        news = tuple((node.key, node.kind.name, ways.to(node)) for node in walk.added)
        stayed: tuple[tuple[str, str, bool], ...] = ()
        if walk.stayed:
            from nbtrain.exchange.travel_check import path_of

            stayed = tuple((path_of(culprit), culprit.reason, culprit.known) for culprit in walk.stayed)
        home = HomeParcel(write(content), news, self.deleted, stayed, walk.holders())
        content.buffers = []  # they would keep alive what the next line of the user's may let go
        self._walk = walk
        return home

    def leave(self, key: int, reason: str, packer: Packer, pieces: Pieces | None) -> HomeParcel:
        """The same without this new object."""
        assert self._walk is not None
        self._staying[id(self.table.nodes[key].obj)] = Stay(reason, False)
        self._walk.undo()
        self._checksums = {}
        return self.pack(packer, pieces)

    def _look(self, packs: bool = True) -> tuple[Walk, dict[str, int]]:
        walk = Walk(self.table, self.namespace, quiet=not packs, reads=True, keep_home=True)
        walk.staying = self._staying
        walk.checksums = self._checksums
        for name in self.keep:
            value = self.namespace.get(name, MISSING)
            if not walk.pass_by(value) and name in self.bound and packs:
                self._staying.setdefault(id(value), Stay(ASKED, True))
        weights = {}
        for name in dict.fromkeys([*self.known, *self.bound]):
            if name in self.before and self.before[name] is not self.namespace.get(name, MISSING):
                walk.name(name, self.before[name])
                del walk.content.names[name]
            if name in self.namespace:
                before = walk.new_bytes
                walk.name(name, self.namespace[name])
                weights[name] = walk.new_bytes - before
        for state in self.modules:
            walk.name(MODULE + state.name, state)
        return walk, weights


@contextmanager
def _writing(packer: Packer, pieces: Pieces | None) -> Iterator[Callable[[ParcelContent], Parcel]]:
    """How what a walk found becomes a parcel. The others, who serve `pieces`, are told what is wanted of them, also if
    it does not come to that."""

    def write(content: ParcelContent) -> Parcel:
        if pieces is not None:
            pieces.announce(fetched(content))
        return packer.pack(content, (KERNEL,))

    with pieces.gathering() if pieces is not None else nullcontext():
        yield write


def pull(
    table: ObjectTable, namespace: dict[str, Any], key: int, packer: Packer, pieces: Pieces | None
) -> tuple[Parcel | None, str]:
    """A copy of what lives under a handle's key; or why there can be none."""
    with _writing(packer, pieces) as write:
        node = table.nodes.get(key)
        if node is None:
            return None, "it was never made there"
        learn_atoms()
        identity = node.kind.identity(node.obj)
        walk = Walk(table, namespace)
        del table.by_id[identity]  # for this walk it is an object like any other
        try:
            walk.name("it", node.obj)
            content = walk.finish()
            if walk.culprits:
                from nbtrain.exchange.travel_check import path_of

                return None, "; ".join(f"{path_of(culprit)}: {culprit.reason}" for culprit in walk.culprits)
            return write(content), ""
        finally:
            walk.undo()
            table.by_id[identity] = node


def spared(table: ObjectTable, keys: Iterable[int]) -> list[tuple[int, Any]]:
    """What the notebook has handles for."""
    handle = dispatch.kind_named("handle")
    return [(key, table.nodes[key].obj) for key in keys if key in table.nodes and table.nodes[key].kind is handle]
