"""A rank's side of the exchange: parcels are opened into its namespace, what a cell changed is packed for home."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from nbtrain.exchange import kinds
from nbtrain.exchange.kinds import numeric
from nbtrain.exchange.kinds.tensors import moved
from nbtrain.exchange.names import private
from nbtrain.exchange.parcel import Opener, Packer, Parcel
from nbtrain.exchange.pickle_check import path_of
from nbtrain.exchange.residence import Arrival, Node, Table, Walk, Way, Ways, find_all, remember

KERNEL = -1
"""The reader of what goes home."""

OPTION = "--"
"""No name of Python's begins so: under such names the strategy's options travel."""

New = tuple[int, str, Way | None]
"""A key the lead gave to a new object, its kind, and where the other ranks find theirs."""


@dataclass(frozen=True, slots=True)
class Home:
    """What comes home after a cell."""

    parcel: Parcel
    news: tuple[New, ...]
    deleted: tuple[str, ...]
    stayed: tuple[tuple[str, str], ...]
    """path and reason of what cannot leave the ranks"""


class Twins:
    """What this rank holds of the notebook's objects."""

    def __init__(self, rank: int, world_size: int, namespace: dict[str, Any], directory: str, device: str) -> None:
        self.rank = rank
        self.namespace = namespace
        self.device = device
        self.table = Table(-1 - rank, -world_size)
        self.opener = Opener()
        self.packer = Packer(directory, again=False)
        self._holds: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        """the strategy's, of the cell that was sent last: they may be classes of the notebook"""
        self._unsure = False
        """another rank was the lead: what this one remembers may be behind"""

    def open(self, parcel: Parcel, drop: Iterable[int], unbind: Iterable[str]) -> tuple[list[Node], dict[str, Any]]:
        """Put what the notebook sent in place; returns what is new or changed, and the names that were bound."""
        numeric.learn_atoms()
        self.table.drop(drop)
        for name in unbind:
            self.namespace.pop(name, None)
        cargo, buffer = self.opener.open(parcel)
        arrival = Arrival(self.table, self.namespace, cargo, buffer, self._place, self.opener.renew)
        touched = arrival.commit()
        options = {name: arrival.names.pop(name) for name in list(arrival.names) if name.startswith(OPTION)}
        self.options = {name.removeprefix(OPTION): value for name, value in options.items()}
        self.namespace.update(arrival.names)
        remember(self.table, self.namespace, touched)
        return touched, arrival.names

    def _place(self, kind: str) -> str:
        return self.device if kind == "cuda" else kind

    def adopt(self, news: Iterable[New]) -> tuple[int, ...]:
        """Find this rank's own objects for the keys the lead gave; returns the keys for which there are none."""
        lacking = []
        found: dict[int, Node] = {}
        ways = Ways(self.table, self.namespace)
        for key, kind, way in news:
            obj = ways.follow(way) if way is not None else None
            wanted = kinds.kind_named(kind)
            kept = wanted is kinds.kind_named("handle")
            if way is None or obj is None or not (kept or kinds.kind_of(obj, self.namespace) is wanted):
                lacking.append(key)
            elif self.table.by_id.get(wanted.identity(obj)) is None:
                found[key] = self.table.add(key, obj, wanted)
                if way[0] in self.table.nodes:
                    found[way[0]] = self.table.nodes[way[0]]
        for node in found.values():
            node.seen = None
        remember(self.table, self.namespace, found.values())
        return tuple(lacking)

    def inherit(self, table: Table) -> None:
        """This process was forked from the kernel: it has the notebook's own objects under the kernel's keys."""
        table._next, table._step = self.table._next, self.table._step
        self.table = table

    def alone(self, name: str, obj: Any) -> Parcel | None:
        """One object packed by itself, or None when it cannot travel."""
        walk = Walk(self.table, self.namespace)
        walk.name(name, obj)
        cargo = walk.finish()
        return None if walk.culprits else self.packer.pack(cargo, (KERNEL,))

    def find(self, names: dict[str, Any], wanted: tuple[type, ...]) -> dict[str, Any]:
        return find_all(self.table, names, wanted)

    def start(self, touched: Iterable[Node], lead: bool) -> None:
        """Just before the cell: remember how things are, so that afterwards what it changed is known."""
        if lead:
            if self._unsure:
                for node in self.table.nodes.values():
                    node.seen = None
                touched = list(self.table.nodes.values())
            remember(self.table, self.namespace, touched)
        self._unsure = not lead
        self._holds = {name: value for name, value in self.namespace.items() if not private(name)}

    def changes(self, names: Iterable[str]) -> Home:
        """What the cell changed, assigned and deleted, packed for the notebook."""
        numeric.learn_atoms()
        walk = Walk(self.table, self.namespace, keep_home=True)
        namespace, before = self.namespace, self._holds
        missing = object()
        bound = [n for n, v in namespace.items() if not private(n) and before.get(n, missing) is not v]
        deleted = tuple(name for name in before if name not in namespace)
        known = [name for name in names if name in namespace]
        for name in dict.fromkeys([*known, *bound]):
            walk.name(name, namespace[name])
        cargo = walk.finish()
        replaced = {key for key, value in cargo.names.items() if getattr(value, "key", None) in walk.made_anew}
        cargo.names = {n: v for n, v in cargo.names.items() if n in bound or n in replaced}
        self._holds = {}
        ways = Ways(self.table, namespace)
        news = tuple((node.key, node.kind.name, ways.to(node)) for node in walk.added)
        stayed = tuple((path_of(culprit), culprit.reason) for culprit in walk.stayed)
        return Home(self.packer.pack(cargo, (KERNEL,)), news, deleted, stayed)

    def released(self) -> tuple[int, ...]:
        """Segments of the notebook's that this rank does not use any more; it may write to the others again."""
        if self.opener.maps_large:
            self.opener.keep_apart(moved(self.table.nodes.values()))
        return self.opener.released()

    def forget(self, close: Callable[[], None]) -> None:
        """Everything that came from the notebook goes; modules that were imported stay imported."""
        close()
        self.opener = Opener()  # the notebook counts its segments from one again
        self.packer.close()
        for name in [name for name in self.namespace if not private(name)]:
            del self.namespace[name]
        self.table = Table(self.table._next, self.table._step)
        self._holds = {}
        gc.collect()
