"""A rank's side of the exchange: opens parcels into its namespace, and packs what a cell changed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from nbtrain.exchange import python_module_baseline
from nbtrain.exchange.graph.find_changes import Walk, remember
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.graph.open_parcel import OpenedParcel
from nbtrain.exchange.graph.rank_paths import RankPaths
from nbtrain.exchange.kinds import dispatch
from nbtrain.exchange.kinds.base import OPTION, Node, learn_atoms
from nbtrain.exchange.kinds.python_module_state import MODULE
from nbtrain.exchange.kinds.split_tensors import note_aliases
from nbtrain.exchange.kinds.tensors import moved
from nbtrain.exchange.names.cell_names import own
from nbtrain.exchange.parcel import HomeParcel, NewObject, Opener, Packer, Parcel
from nbtrain.worker.home.pack_changes import KERNEL, MISSING, PackChanges, pull, spared
from nbtrain.worker.setup.replace_references import replace_references


class RankSide:
    """What this rank holds of the notebook's objects."""

    def __init__(self, rank: int, world_size: int, namespace: dict[str, Any], directory: str, device: str) -> None:
        self.rank = rank
        self.namespace = namespace
        self.device = device
        self.table = ObjectTable(-1 - rank, -world_size)
        self.opener = Opener()
        self.packer = Packer(directory, again=False)
        self._holds: dict[str, Any] = {}
        self._homeward: PackChanges | None = None
        self.modules: dict[str, Any] = {}
        """what was set in modules, as the notebook sent it for the last cell"""
        self.unsendable: list[str] = []
        """what the last cell set in modules and cannot come home"""
        self.options: dict[str, Any] = {}
        """the strategy's, of the cell that was sent last: they may be classes of the notebook"""
        from nbtrain.worker.home.pieces import Pieces  # it loads torch

        self.pieces = Pieces(rank, world_size, self.table)
        self._states: dict[int, tuple[Any, Any]] = {}
        """key → optimizer and its state when the cell began: a replaced state may be referenced elsewhere"""
        self.aliases: list[Any] = []
        """of the tensors in pieces, for the cell that begins (`note_aliases`)"""
        self._unsure = False
        """another rank was the lead, so what this one remembers may be outdated"""

    def open(self, parcel: Parcel, drop: Iterable[int], unbind: Iterable[str]) -> tuple[list[Node], dict[str, Any]]:
        """Put what the notebook sent in place; returns what is new or changed, and the names that were bound."""
        learn_atoms()
        self._homeward = None  # what the last cell let go of goes before anything new is made
        self.pieces.settled()
        self.table.drop(drop)
        for name in unbind:
            self.namespace.pop(name, None)
        content, buffer = self.opener.open(parcel)
        arrival = OpenedParcel(self.table, self.namespace, content, buffer, self._place, self.opener.renew)
        touched = arrival.commit()
        options = {name: arrival.names.pop(name) for name in list(arrival.names) if name.startswith(OPTION)}
        self.options = {name.removeprefix(OPTION): value for name, value in options.items()}
        names = {name: value for name, value in arrival.names.items() if not name.startswith(MODULE)}
        self.modules = {n.removeprefix(MODULE): value for n, value in arrival.names.items() if n.startswith(MODULE)}
        self.namespace.update(names)
        remember(self.table, self.namespace, touched)
        self.pieces.take_over()
        return touched, names

    def _place(self, kind: str) -> str:
        return self.device if kind == "cuda" else kind

    def adopt(self, news: Iterable[NewObject], holders: Iterable[int] = ()) -> tuple[int, ...]:
        """Find this rank's own objects for the keys the lead gave; returns the keys for which there are none.
        `holders`: known ones that hold others now."""
        lacking = []
        nodes: dict[int, Node] = {}
        ways = RankPaths(self.table, self.namespace)
        for key, kind, way in news:
            obj = ways.follow(way) if way is not None else None
            wanted = dispatch.kind_named(kind)
            fits = wanted in (dispatch.kind_named("handle"), dispatch.kind_of(obj, self.namespace, self.table.apart))
            if way is None or obj is None or not fits:
                lacking.append(key)
                continue
            known = self.table.by_id.get(wanted.identity(obj))
            if known is not None and known.key != key:  # one object here for two of the lead's
                lacking.append(key)
            elif known is None:
                nodes[key] = self.table.add(key, obj, wanted)
                where, fixed, index, _ = way
                if where in self.table.nodes:
                    holder = nodes[where] = self.table.nodes[where]
                    if fixed and holder.fixed and index < len(holder.fixed):  # it was made with another
                        holder.fixed[index] = nodes[key]
        for key in holders:
            if key in self.table.nodes:
                nodes[key] = self.table.nodes[key]
        for node in nodes.values():
            node.seen = None
        remember(self.table, self.namespace, nodes.values())
        return tuple(lacking)

    def inherit(self, table: ObjectTable) -> None:
        """Use the kernel's table: this process was forked from the kernel and has its objects."""
        table.last_key, table.step = self.table.last_key, self.table.step
        self.table = self.pieces.table = table

    def alone(self, name: str, obj: Any) -> Parcel | None:
        """One object packed by itself, or None when it cannot travel."""
        walk = Walk(self.table, self.namespace)
        try:
            walk.name(name, obj)
            content = walk.finish()
            return None if walk.culprits else self.packer.pack(content, (KERNEL,))
        finally:
            walk.undo()  # the notebook opens it by itself too, and does not keep what came with it

    def holds(self, obj: object) -> bool:
        """Whether the notebook or a name of this rank's leads to it."""
        return self.table.find(obj) is not None or any(value is obj for value in self.namespace.values())

    def is_whole(self, value: object) -> bool:
        """Whether it leads to no other object: a number, a tensor."""
        node = self.table.find(value)
        return node is None or node.kind.whole

    def with_gradients(self) -> tuple[int, ...]:
        """Keys of the tensors that have one."""
        import torch

        found = [node for node in self.table.nodes.values() if isinstance(node.obj, torch.Tensor)]
        keys = []
        for node in found:
            try:
                if node.obj.is_leaf and node.obj.grad is not None:
                    keys.append(node.key)
            except RuntimeError:  # as `tensors.is_leaf` has it; a call more for each tensor would be felt
                continue
        return tuple(keys)

    def objects(self, keys: Iterable[int]) -> dict[int, Any]:
        return {key: self.table.nodes[key].obj for key in keys if key in self.table.nodes}

    def replace(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Replace tensors, as pairs (old, new), wherever this process refers to them."""
        replace_references(pairs, [self.namespace])
        for old, new in pairs:
            node = self.table.find(old)
            if node is not None:
                fixed, memo = node.fixed, node.memo
                self.table.replace(node, new, node.kind)
                node.fixed = fixed
                if memo is not None:  # which part of its memory it shows in the notebook
                    memo.flat = memo.memory = None
                    node.memo = memo
            apart = self.table.apart.pop(id(old), None)
            if apart is not None:  # set up again, it is in pieces again
                self.table.apart[id(new)] = apart

    def parted(self, pieces: Iterable[tuple[Any, Any]], touched: Iterable[Node]) -> list[Node]:
        """These tensors are in pieces here, before a cell begins. Collective. `touched`: nodes that are new or have
        changed. Returns those that are to be remembered as they are now."""
        learned = self.pieces.learn(pieces)
        self.pieces.refuse_stayed()
        self.aliases = note_aliases(self.table, touched) if self.pieces else []
        if not learned:
            return []
        apart = self.table.apart
        return [n for n in self.table.nodes.values() if any(id(child.obj) in apart for child in n.children)]

    def compare(self, pieces: Iterable[tuple[Any, Any]], names: Iterable[str], keep: Container[str] = ()) -> None:
        """After a cell: which tensors in pieces the notebook has differently. Collective. `names`: those that the
        notebook sent for it; `keep`: those that are to stay here."""
        pieces = list(pieces)
        if pieces or self.pieces:
            values = {name: self.namespace[name] for name in {*names, *self._bound()} if name in self.namespace}
            values |= {
                f"{key} before": state_before
                for key, (tensor_now, state_before) in self._states.items()
                if tensor_now.state is not state_before
            }
            from nbtrain.worker.home.weight_views import WeightViews  # where there are none, nothing shows them

            self.replace(self.pieces.take_in(values, pieces, WeightViews(pieces).below(values, keep)))
            self.pieces.learn_views(self.pieces.learn(pieces, before_cell=False))
            self.pieces.compare()

    def _bound(self) -> list[str]:
        """Names that the cell has assigned."""
        sent_values = self._holds
        return [name for name in own(self.namespace) if sent_values.get(name, MISSING) is not self.namespace[name]]

    def start(self, touched: Iterable[Node], lead: bool) -> None:
        """Just before the cell: remember the present state, so that its changes are found afterwards."""
        if lead:
            if self._unsure:
                for node in self.table.nodes.values():
                    node.seen = None
                touched = list(self.table.nodes.values())
            remember(self.table, self.namespace, touched)
        self._unsure = not lead
        self._homeward = None
        optimizer = dispatch.kind_named("optimizer")
        nodes = self.table.nodes.values() if self.pieces else ()
        self._states = {n.key: (n.obj, n.obj.state) for n in nodes if n.kind is optimizer and hasattr(n.obj, "state")}
        self._holds = {name: self.namespace[name] for name in own(self.namespace)}

    def become_lead(self) -> None:
        """Bring this rank's changes home: the lead is gone. Everything counts as changed, it remembered nothing."""
        for node in self.table.nodes.values():
            node.seen = None

    def homeward(self, names: Iterable[str], keep: tuple[str, ...], limit: float) -> PackChanges:
        """What the cell changed, assigned and deleted. `names`: those that the notebook sent for it."""
        if self._homeward is not None:  # this rank has ended the cell, and is the lead after all
            return self._homeward
        now, before = self.namespace, self._holds
        deleted = tuple(name for name in before if name not in now)
        names = list(names)
        sent_values = {name: before[name] for name in names if name in before}
        modules, self.unsendable = python_module_baseline.look(self.table, now)
        self._homeward = PackChanges(self.table, now, names, self._bound(), deleted, keep, limit, sent_values, modules)
        self._holds = {}
        return self._homeward

    def leave(self, key: int, reason: str, together: bool) -> HomeParcel:
        """Pack again without this object, which the notebook cannot make."""
        assert self._homeward is not None
        return self._homeward.leave(key, reason, self.packer, self.pieces if together else None)

    def pull(self, key: int, drop: Iterable[int], together: bool) -> tuple[Parcel | None, str]:
        self.table.drop(drop)
        return pull(self.table, self.namespace, key, self.packer, self.pieces if together else None)

    def released(self) -> tuple[int, ...]:
        """Segments of the notebook that this rank no longer maps; the notebook may write to the others again."""
        if self.opener.maps_large:
            self.opener.keep_apart(moved(self.table.nodes.values()))
        return self.opener.released()

    def forget(self, close: Callable[[bool], None], spare: Iterable[int], known: Iterable[int], whole: bool) -> None:
        """Drop everything that came from the notebook, except objects with handles and what those hold; modules stay
        imported. `whole`: no piece is lost."""
        pairs = self.pieces.full_tensors() if spare and whole else []
        close(False)
        self.replace(pairs)
        self.pieces.forget()
        self.opener = Opener()  # the notebook counts its segments from one again
        self.packer.close()
        for name in own(self.namespace):
            del self.namespace[name]
        python_module_baseline.restore()
        kept = spared(self.table, spare)
        known = set(known)
        held = [node for node in self.table.nodes.values() if node.key in known]
        self.table = self.pieces.table = ObjectTable(self.table.last_key, self.table.step)
        for key, obj in kept:
            self.table.add(key, obj, dispatch.kind_named("handle"))
        for node in held:
            node.seen = node.memo = None
            self.table.adopt(node)
        self._unsure = True
        self._holds = {}
        self._homeward = None
        gc.collect()
