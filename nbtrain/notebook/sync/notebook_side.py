"""The notebook's side of the exchange with one pool: sends what ranks need, takes in what they changed."""

from __future__ import annotations

import collections
import linecache
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType
from typing import Any

from nbtrain.base.errors import CannotTravel
from nbtrain.base.messages import LATELY, CellSource
from nbtrain.exchange import python_module_baseline
from nbtrain.exchange.graph.find_changes import Culprit, Walk, remember
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.graph.open_parcel import OpenedParcel
from nbtrain.exchange.kinds.base import ATOMS, OPTION, Handle, MakeTwin, Node, ParcelContent, keys_in, learn_atoms
from nbtrain.exchange.kinds.python_module_state import MODULE, states
from nbtrain.exchange.names.name_order import NameOrder
from nbtrain.exchange.parcel import HomeParcel, Opener, Packer, Parcel
from nbtrain.notebook.sync.kept_handles import held, live_handles
from nbtrain.worker.random_states.default_generators import States, capture, packed, restore, unpacked

MISSING = object()
BUDGET = 0.2
"""Seconds for one name after which the user is told what comparing it costs before every cell."""
CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter)
LEARNING = ("module", "optimizer", "scheduler", "loader", "compiled")
"""Kinds that a strategy keeps equal on all ranks."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What one cell sends."""

    parcel: Parcel
    drop: tuple[int, ...]
    unbind: tuple[str, ...]
    released: dict[int, tuple[int, ...]]
    """rank → its segments that the notebook does not use any more"""
    random_states: States | None
    sources: tuple[CellSource, ...]


class NotebookSide:
    """Belongs to one pool, and is replaced when its ranks forget their twins."""

    def __init__(
        self, namespace: dict[str, Any], directory: str, readers: Iterable[int], numbers: Mapping[str, int]
    ) -> None:
        self.namespace = namespace
        self.table = ObjectTable(0)
        self._places = NameOrder(namespace)
        self.packer = Packer(directory)
        self.readers = tuple(readers)
        self._openers: dict[int, Opener] = {rank: Opener() for rank in self.readers}
        self._numbers = numbers
        self._names: dict[str, Any] = {}
        """name → what was last sent or brought home under it"""
        self._roots: dict[str, set[int]] = {}
        """name → the keys in it; also of the options of the last cell"""
        self._lacking: set[int] = set()
        self._random_states: States | None = None
        self.left: set[str] = set()
        """names that could not be sent, and that the last cell may assign before it reads them"""
        self._running = ""
        """the file name of the last cell: nothing of the notebook's was made in it"""
        self._told: set[str] = set()
        self.ahead: set[str] = set()
        """names of notebook objects that `--keep` left on the ranks: theirs may have changed since"""
        self.unchanged: list[str] = []
        """notebook objects that the last cell changed, and whose class refused the change here"""
        self.unsendable: list[str] = []
        """sentences about what was set in modules and cannot travel"""
        self.slow: dict[str, float] = {}
        """name whose comparison took long → seconds, the first time"""
        self._orphans: list[Node] = []
        """handles that the notebook holds without a name"""
        self._other_names: dict[str, Any] = {}
        """what the ranks hold from another name, as a model in a container, and the notebook by this one, too"""
        self._dropped: list[int] = []
        self._unbound: list[str] = []
        self._held: tuple[ParcelContent, Callable[[int], memoryview]] | None = None
        """what a failed cell has left, which comes home if the user says so"""
        self._held_tensors: set[int] = set()

    # -- out -----------------------------------------------------------------------------

    def outgoing(
        self,
        hard: Iterable[str],
        soft: Iterable[str],
        options: Mapping[str, Any] = MappingProxyType({}),
        *,
        everything_goes: bool = False,
        running: str = "",
    ) -> Outgoing:
        """What the ranks lack of these names, for the cell of file name `running`. Raises CannotTravel before anything
        is sent. `everything_goes`: the ranks are forks of this process, so they have what cannot be pickled, too."""
        learn_atoms()
        self.release_dropped()
        self._running = running
        wanted = {*hard, *self._travelling(soft)}
        walk = Walk(self.table, self.namespace, keep_home=everything_goes)
        walk.remake = set(self._lacking) & set(self.table.nodes)
        try:
            for name in self._places.ordered(wanted):
                self._timed(walk, name)
            used = python_module_baseline.used_by(self.namespace[name] for name in wanted)
            modules, self.unsendable = python_module_baseline.look(self.table, self.namespace, used)
            self.unsendable += self._slow_modules()
            for state in modules:
                walk.name(MODULE + state.name, state)
            for name, value in options.items():
                walk.name(OPTION + name, value)
            content = walk.finish()
            if everything_goes:  # the forks hold the very objects
                content.records, content.buffers = [], []
            if walk.culprits:
                raise self._refusal(walk.culprits)
            parcel = self.packer.pack(content, self.readers)
        except BaseException:  # also Stop: what was not sent must not count as sent
            walk.undo()
            raise
        self._lacking &= walk.remake
        if self._bind(content.names, once=OPTION) or walk.loosened:
            self._sweep()  # sent with this cell: what comes home must not name what is forgotten here
        drop, self._dropped = tuple(self._dropped), []
        unbind, self._unbound = tuple(self._unbound), []
        self._names.update({n: self.namespace[n] for n in content.names if not n.startswith((OPTION, MODULE))})
        return Outgoing(
            parcel=parcel,
            drop=drop,
            unbind=unbind,
            released={rank: self.released(rank) for rank in self.readers},
            random_states=self._random_states_to_send(),
            sources=tuple(self._sources(walk.added)),
        )

    def _slow_modules(self) -> list[str]:
        slow = [state for state in states() if state.seconds > BUDGET and MODULE + state.name not in self.slow]
        self.slow.update((MODULE + state.name, state.seconds) for state in slow)
        return [
            f"looking for changes in what the module {state.name} holds took {state.seconds:.1f} s, and does so before "
            "each cell; an array, a tensor or a tuple in place of its lists and dicts costs next to nothing"
            for state in slow
        ]

    def _timed(self, walk: Walk, name: str) -> None:
        """Compare all of it, however long that takes; if long, the user is told of a faster form."""
        known = name in self._names
        began = time.perf_counter()
        walk.name(name, self.namespace[name])
        spent = time.perf_counter() - began
        if known and spent > BUDGET and type(self.namespace[name]) in CONTAINERS:
            self.slow.setdefault(name, spent)

    def _travelling(self, soft: Iterable[str]) -> list[str]:
        """The names that can travel among those that the cell assigns before it may read them."""
        soft = list(soft)
        self.left = {name for name in soft if self._culprits(name)}
        return [name for name in soft if name not in self.left]

    def _culprits(self, name: str) -> list[Culprit]:
        value = self.namespace[name]
        if type(value) in ATOMS or self.table.find(value) is not None:
            return []
        walk = Walk(self.table, self.namespace)
        walk.name(name, value)
        walk.finish()
        walk.undo()
        return walk.culprits

    def with_gradients(self) -> tuple[int, ...]:
        """Keys of the tensors that have a gradient here."""
        leaves = [(node.key, node.obj) for node in self.table.nodes.values() if node.kind.leaf and node.obj is not None]
        return tuple([key for key, t in leaves if t.requires_grad and t.is_leaf and t.grad is not None])

    def why_left(self, name: str) -> str:
        return str(self._refusal(self._culprits(name)))

    def _refusal(self, culprits: list[Culprit]) -> CannotTravel:
        from nbtrain.exchange.cell_lines import Cells
        from nbtrain.exchange.travel_check import findings, told

        return CannotTravel(told(findings(culprits, self.namespace, Cells(self._numbers, self._running))))

    def _random_states_to_send(self) -> States | None:
        now = packed(capture())
        changed, self._random_states = now != self._random_states, now
        return now if changed else None

    def _sources(self, added: Iterable[Node]) -> Iterable[CellSource]:
        """Texts, not sent yet, of the cells that define the functions that are sent."""
        for node in added:
            name = node.obj.__code__.co_filename if type(node.obj) is FunctionType else None
            if name is not None and name not in self._told and (source := self.source(name)) is not None:
                yield source

    def source(self, filename: str) -> CellSource | None:
        entry = linecache.cache.get(filename)
        if entry is None or len(entry) < 3 or os.path.exists(filename):  # the ranks read files for themselves
            return None
        if len(self._told) >= LATELY:  # older ones may be gone there by now
            self._told.clear()
        self._told.add(filename)
        return CellSource(filename=filename, text="".join(entry[2]), number=self._numbers.get(filename))

    # -- in ------------------------------------------------------------------------------

    def homecoming(self, rank: int, home: HomeParcel, random_states: States | None) -> list[Node]:
        """Put what comes home in place, once all of it is opened. Returns the nodes that are new or changed."""
        learn_atoms()
        content, buffer = self._held or self._openers[rank].open(home.parcel)
        arrival = OpenedParcel(self.table, self.namespace, content, buffer, _place, lenient=True)
        touched = arrival.commit()
        self.unchanged = arrival.left
        names = {name: value for name, value in arrival.names.items() if not name.startswith(MODULE)}
        self.namespace.update(names)
        loosened = any(type(record) is MakeTwin and record.anew for record in content.records)
        for name in home.deleted:
            self.namespace.pop(name, None)
            self._names.pop(name, None)
            loosened |= bool(self._roots.pop(name, None))
        self._names.update(names)
        loosened |= self._bind(content.names)
        loosened |= remember(self.table, self.namespace, touched)
        if loosened:
            self._sweep()
        if (
            random_states is not None and random_states != self._random_states
        ):  # where the cell drew nothing, they stand already
            restore(unpacked(random_states))
            self._random_states = None  # the other ranks do not have the lead's
        return touched

    def hold(self, rank: int, home: HomeParcel) -> None:
        """Map what is to come home at some time, as its rank will be gone by then. Raises where it cannot be made."""
        learn_atoms()
        if home.news:
            OpenedParcel(self.table, dict(self.namespace), *Opener().open(home.parcel), _place, lenient=True)
        content, buffer = self._openers[rank].open(home.parcel)
        for index in range(len(home.parcel.pieces)):
            buffer(index)
        self._held = content, buffer
        edited = [self.table.nodes.get(record.key) for record in content.records]
        self._held_tensors = {id(node.obj) for node in edited if node is not None and node.kind.name == "tensor"}

    def holds_any(self, nodes: Iterable[Node]) -> bool:
        """Whether what is held would write one of these tensors."""
        return any(id(node.obj) in self._held_tensors for node in nodes)

    def changed_since(self, home: HomeParcel, before: Mapping[str, Any]) -> list[str]:
        """Names that the user has changed since the last cell was sent, and that what comes home would overwrite.
        `found`: what the names that the cell may assign held."""
        content, _ = self._held or Opener().open(home.parcel)
        coming = {record.key for record in content.records}
        assigned = {
            name for name in (*content.names, *home.deleted) if name in before and self._other(name, before[name])
        }
        edited = {name for name, value in self._names.items() if coming & self._changed_below(name, value)}
        return sorted(assigned | edited)

    def _changed_below(self, name: str, value: Any) -> set[int]:
        """Keys of what the user has changed below the name; all of it when the name holds something else now."""
        if self._other(name, value):
            return self.table.nodes.keys() - set(self.table.unreachable(self._roots.get(name, ())))
        walk = Walk(self.table, self.namespace)
        try:
            walk.name(name, value)
            return {record.key for record in walk.finish().records}
        finally:
            walk.undo()

    def _other(self, name: str, value: Any) -> bool:
        return not same(self.namespace.get(name, MISSING), value)

    def rename(self, names: Iterable[str]) -> None:
        """Let these names hold again what was sent for the last cell."""
        self.namespace.update({name: self._names[name] for name in names if name in self._names})

    def others_are_behind(self, home: HomeParcel) -> None:
        """Not all ranks ran the cell: send the others' twins again when needed, random states with the next cell."""
        self._random_states = None
        content, _ = Opener().open(home.parcel)
        for record in content.records:
            if record.key in self.table.nodes:
                self.table.nodes[record.key].seen = None
        self._lacking.update(key for key, _, _ in home.news)

    def lacks(self, keys: Iterable[int]) -> None:
        """Send these keys again: some rank has nothing under them."""
        self._lacking.update(keys)
        for key in keys:
            if key in self.table.nodes:
                self.table.nodes[key].seen = None

    def differs(self, names: Iterable[str]) -> None:
        """Send what is below these names again before its next use: it differs between ranks."""
        todo = [self.table.nodes[key] for name in names for key in self._roots.get(name, ()) if key in self.table.nodes]
        seen = set()
        while todo:
            node = todo.pop()
            if node.key not in seen and node.kind.name not in LEARNING and not node.kind.constant:
                seen.add(node.key)
                node.seen = None
                todo += node.children

    def differ_at(self, keys: set[int]) -> dict[str, list[str]]:
        """Send these again before their next use, and random states: they differ between ranks. Returns the paths to
        the outermost of them, by the name that leads there."""
        self._random_states = None  # drawn from for a layer, say
        optimizers = []
        for key in keys & self.table.nodes.keys():
            self.table.nodes[key].seen = None
            if self.table.nodes[key].kind.name == "optimizer":
                optimizers.append(key)
        below = set(self.table.nodes) - set(self.table.unreachable(optimizers)) if optimizers else ()
        for key in below:  # its states were compared as a whole
            if self.table.nodes[key].kind.name == "tensor":
                self.table.nodes[key].seen = None
        paths_of: dict[str, list[str]] = {}
        passed: set[int] = set()
        nodes = self.table.nodes
        ahead: collections.deque[tuple[str, Node, list[Any]]] = collections.deque(
            (name, nodes[key], [name]) for name in self._names for key in self._roots.get(name, ()) if key in nodes
        )
        while ahead:
            name, node, trail = ahead.popleft()
            if node.key in passed:
                continue
            passed.add(node.key)
            trail = [*trail, node.obj]
            if node.key in keys:
                from nbtrain.exchange.travel_check import path_of

                paths_of.setdefault(name, []).append(path_of(Culprit(node.obj, "", trail)))
            else:
                ahead += [(name, child, trail) for child in (*node.children, *(node.fixed or ()))]
        return paths_of

    def resend(self) -> None:
        """Send all tensors and random states again before their next use: the ranks disagree."""
        self._random_states = None
        for node in self.table.nodes.values():
            if node.kind.name == "tensor":
                node.seen = None

    def inherit(self, before: NotebookSide) -> None:
        """After a failure: take over handles whose objects the ranks kept. What these hold is sent again before use."""
        self.table = before.table.copied()  # that one may be held
        handles = set(live_handles(self.table, worth=True))
        gone = set(self.table.unreachable(node.key for node in handles))
        gone |= {node.key for node in self.table.nodes.values() if type(node.obj) is Handle and node not in handles}
        self.table.drop(gone)
        for node in self.table.nodes.values():
            if node not in handles:
                view = node.kind.name == "array" and node.fixed  # its owner has the content
                node.seen = node.seen if view else None
                self._lacking.add(node.key)
        for name, keys in before._roots.items():
            value = self.namespace.get(name)
            if type(value) is Handle and self.table.find(value) is not None:
                self._names[name], self._roots[name] = value, keys
        self._orphans = [node for node in handles if not any(node.key in keys for keys in self._roots.values())]

    @property
    def forgotten(self) -> tuple[int, ...]:
        """Keys that the notebook has dropped; the ranks are told with the next cell."""
        return tuple(self._dropped)

    def open_alone(self, rank: int, parcel: Parcel, name: str) -> Any:
        """Open one object that a rank packed, without keeping it in the table."""
        content, buffer = self._openers[rank].open(parcel)
        here = name in self.namespace
        try:
            return OpenedParcel(self.table, self.namespace, content, buffer, _place).names[name]
        finally:
            if not here:  # code that ran while it was opened may have needed the name
                self.namespace.pop(name, None)

    def released(self, rank: int) -> tuple[int, ...]:
        """The rank's segments that the notebook does not use any more."""
        return self._openers[rank].released()

    def refuse(self, rank: int, parcel: Parcel) -> None:
        """Release what a rank packed and nobody wants any more."""
        self._openers[rank].open(parcel)

    # -- dropping ------------------------------------------------------------------------

    def release_dropped(self) -> None:
        """Drop objects that the notebook no longer holds under their name, here at once, on the ranks with the next
        cell. Also called between cells."""
        namespace = self.namespace
        gone = [name for name, value in self._names.items() if namespace.get(name, MISSING) is not value]
        others = self._other_names.items()
        if not gone and all(map(held, self._orphans)) and all(namespace.get(name) is value for name, value in others):
            return
        for name in gone:
            del self._names[name]
            self._roots.pop(name, None)
        self._unbound += gone
        self._sweep()

    def _bind(self, encoded: Mapping[str, Any], once: str | None = None) -> bool:
        """Note the keys below each name. Returns whether a name lost a key; names that begin with `once` lose all."""
        ended = [name for name in self._roots if once is not None and name.startswith(once)]
        before = [self._roots.pop(name) for name in ended]
        loosened = any(before)
        for name, value in encoded.items():
            keys = set(keys_in(value))
            loosened |= not self._roots.get(name, set()) <= keys
            self._roots[name] = keys
        return loosened

    def _sweep(self) -> None:
        """Drop what nothing reaches; the ranks are told with the next cell."""
        roots = {key for roots in self._roots.values() for key in roots}
        handles = [node for node in live_handles(self.table) if held(node)]
        names = {name: value for name, value in self.namespace.items() if name[:1] != "_" and name not in self._roots}
        others = {name: node for name, value in names.items() if (node := self.table.find(value)) is not None}
        keys = self.table.unreachable({*roots, *(node.key for node in (*handles, *others.values()))})
        self._orphans = [node for node in handles if node.key not in roots]
        self._other_names = {name: node.obj for name, node in others.items()}
        self._dropped += keys
        self.table.drop(keys)
        self._lacking.difference_update(keys)

    def names(self) -> tuple[str, ...]:
        """Names whose objects the ranks hold."""
        return tuple(name for name, value in self._names.items() if self.table.find(value) is not None)

    def close(self) -> None:
        self.packer.close()


def same(value: Any, other: Any) -> bool:
    """Whether both are one object, or equal atoms."""
    return value is other or (type(value) is type(other) and type(value) in ATOMS and value == other)


def _place(kind: str) -> str:
    """New CUDA tensors come home to the CPU unless the notebook itself uses the GPU: we never initialise CUDA."""
    torch: Any = sys.modules.get("torch")
    return kind if kind != "cuda" or (torch is not None and torch.cuda.is_initialized()) else "cpu"
