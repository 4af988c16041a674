"""Tensors that the notebook has whole and ranks keep in pieces: gathered on the way home, split on the way here.

Which of them changed is found by checksums of the parts and one small reduction. What changed is gathered one tensor at
a time, while the parcel is written: only the rank that packs it ever has a whole one, and only one.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.base.when_imported import if_imported
from nbtrain.compat.dtensor import is_divided
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds.base import Later
from nbtrain.exchange.kinds.checksum import checksum
from nbtrain.exchange.kinds.split_tensors import (
    Alias,
    Place,
    SplitTensor,
    blank_alias,
    home_window,
    join,
    note_aliases,
    part,
    whole_window,
    window_in,
)
from nbtrain.exchange.kinds.tensors import TENSOR
from nbtrain.worker.ranks.collectives import on_the_wire

ON_META = (
    "a copy of a model in pieces was moved to 'meta', and cannot come home so: write `with whole(model): base = "
    "copy.deepcopy(model).to('meta')`"
)
NOT_THE_SAME = (
    "the ranks no longer hold the same weights and optimizer states: one of them has added, removed or "
    "replaced some by itself (`del optimizer.state[p]` below `if rank == 0:`), and of models that are divided among "
    "the ranks each has a part only. Do it on every rank, without an `if`; or take --strategy ddp, where each rank has "
    "all"
)
STAYED = (
    "a tensor of {name} that a cell before has made, which stayed on the ranks (--keep, or too large to come home): in "
    "one process it goes on being the weight, and here it cannot. Make it in the cell that uses it, or keep a copy "
    "(`copy.deepcopy(model.state_dict())`)"
)

Ranges = list[tuple[int, int]]


class HeldPiece(SplitTensor):
    """The piece of one tensor that this rank keeps."""

    piece: Any
    ranges: list[Ranges]
    """by rank"""
    number: int | None = None
    """checksum of this piece when notebook and ranks last had the same"""


class Pieces:
    """All tensors in pieces: the same ones in the same order on all ranks."""

    def __init__(self, rank: int, world_size: int, table: ObjectTable) -> None:
        self.rank = rank
        self.world_size = world_size
        self.table = table
        self._held: list[HeldPiece] = []
        self._made: list[tuple[Any, Any, Any]] = []
        """what shows those; of the cell that is coming home: (tensor without numbers, of which, form)"""
        self._views: list[Any] = []
        """tensors without numbers, of the last cell"""
        self.made_by_cells: list[tuple[Any, Any]] = []
        """tensors in pieces: a `state_dict`, gradients that were kept, a norm that no rank has whole"""

    def __bool__(self) -> bool:
        return bool(self._held)

    def agree(self, pieces: Iterable[tuple[Any, Any]], made: bool) -> bool:
        """After a cell: raises on all ranks if they do not have the same tensors in pieces. Collective. `made`: this
        cell has left others on this rank. Returns whether it has on any."""
        number = zlib.crc32(repr([(tuple(piece.shape), str(piece.dtype)) for _, piece in pieces]).encode())
        if self.world_size == 1:
            return made
        bounds = torch.tensor([number, -number, made])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        largest, smallest, anywhere = bounds.tolist()
        if largest + smallest:
            raise NotSupported(NOT_THE_SAME)
        return bool(anywhere)

    def learn(self, pieces: Iterable[tuple[Any, Any]], before_cell: bool = True) -> bool:
        """Take these as the tensors in pieces; True if they changed. Collective. Before a cell, a new one that the
        notebook knows has the notebook's content; one that was divided in a cell may have changed since."""
        all_pieces = [*pieces, *self.made_by_cells]
        before = {id(piece_held.tensor): piece_held for piece_held in self._held}
        now = []
        same = True
        for tensor, piece in all_pieces:
            known = before.pop(id(tensor), None)
            if known is None or (known.shape, known.dtype) != (tuple(piece.shape), piece.dtype):
                known = HeldPiece(tensor, piece.shape, piece.dtype, self._fetch)
                known.piece = piece
                if before_cell and self.table.find(tensor) is not None:
                    known.number = _number(known)
                part(self.table, known)
            same = same and known.piece.cut is piece.cut
            known.piece = piece
            now.append(known)
        for known in before.values():
            self._rejoin(known)
        if same and list(map(id, now)) == list(map(id, self._held)):
            return False
        self._held = now
        self._exchange_ranges()
        return True

    def take_in(
        self, values: Mapping[str, Any], pieces: Sequence[tuple[Any, Any]], views: Iterable[tuple[Any, Place]] = ()
    ) -> list[tuple[Any, Any]]:
        """After a cell: what it can have left behind below these names, beside the `pieces` that a strategy knows, and
        the `views` of these. Collective; raises where ranks do not have the same pieces. Returns (old, new) of those
        that are not divided by rows, which are whole from now on, and of what shows one of `pieces`: see
        `learn_views`."""
        known = {id(tensor) for tensor, _ in pieces}
        places = [(tensor, place) for tensor, place in views if self._shared_at_home(tensor, *place)]
        blanks = [(tensor, blank_alias(*place)) for tensor, place in places]
        self._made = [(blank, *place) for (_, blank), (_, place) in zip(blanks, places, strict=True)]
        found = made_by_cell(values, known | {id(tensor) for tensor, _ in places})
        made = self._on_all_ranks(found) if self.agree(pieces, bool(found)) else []
        # A dict of states that no name of this cell leads to goes on being in pieces while the notebook has it; so does
        # what an optimizer was given another state in the place of.
        every: list[Any] = [one.tensor for one in self._held]
        left = [t for t in every if id(t) not in known and self.table.find(t)]
        left = [t for t in left if is_stage_tensor(t) or (is_divided(t) and _by_rows(t))]
        before = {id(tensor): piece for tensor, piece in self.made_by_cells}
        self.made_by_cells = []
        if not made and not left:
            return blanks
        from nbtrain.strategies.kit.row_shards import RowShards, whole
        from nbtrain.strategies.kit.stage_tensors import full_copy

        replaced: list[tuple[Any, Any]] = list(blanks)
        for t in {id(t): t for t in (*made, *left)}.values():
            if _by_rows(t):
                self.made_by_cells.append((t, before.get(id(t)) or RowShards(t)))
            else:
                replaced.append((t, full_copy(t) if is_stage_tensor(t) else whole(t)))
        return replaced

    def _shared_at_home(self, tensor: Any, of: Any, form: Any) -> bool:
        """Whether the notebook can show it so, and does not know the tensor yet, or has it as showing the same
        memory."""
        node, other = self.table.find(tensor), self.table.find(of)
        window = home_window(other, self.table.apart.get(id(of))) or whole_window(tuple(of.shape))
        if window_in(window, form) is None:
            return False
        return node is None or bool(other and node.fixed and other.fixed and node.fixed[0] is other.fixed[0])

    def learn_views(self, learned: bool) -> None:
        """After `learn`, and what that returned: what a cell has left that shows a tensor in pieces travels as a view
        of it."""
        self._views = []
        for blank, of, form in self._made:
            apart = self.table.apart[id(of)]
            window = window_in(apart.window, form)
            assert window is not None, "it was looked whether the notebook can show it"
            self.table.apart[id(blank)] = Alias(blank, apart.place, window)
            self._views.append(blank)
        self._made = []
        if learned or self._views:
            note_aliases(self.table, ())

    def refuse_stayed(self) -> None:
        """Before the next cell: those of them that the notebook was not given, as what is too large for it."""
        views, self._views = self._views, []
        for blank in views:  # of what the notebook has dropped since nothing is known here
            if self.table.find(blank) is None and self.table.apart.pop(id(blank), None) is not None:
                from nbtrain.worker.setup.taken_tensors import give_up

                give_up(blank, "a weight", STAYED)

    def _on_all_ranks(self, made_here: Mapping[str, list[Any]]) -> list[Any]:
        """Those of these tensors that every rank has a part of, as it takes to bring one together. Collective.

        Ranks compare what they have, name by name. What is below a name that only some have, or have otherwise, stays
        as it is."""
        mine = {
            name: [(tuple(t.shape), str(t.dtype), _by_rows(t)) for t in tensors] for name, tensors in made_here.items()
        }
        identities = {name: list(map(id, tensors)) for name, tensors in made_here.items()}
        everybody: list[Any] = [(mine, identities)]
        if self.world_size > 1:
            everybody = [None] * self.world_size
            dist.all_gather_object(everybody, (mine, identities))
        agreed = [name for name in sorted(mine) if all(theirs.get(name) == mine[name] for theirs, _ in everybody)]
        alike = _pattern(agreed, identities)
        if any(_pattern(agreed, theirs) != alike for _, theirs in everybody):
            return []  # two names of one here, two objects there
        return list({id(t): t for name in agreed for t in made_here[name]}.values())

    def full_tensors(self) -> list[tuple[Any, Any]]:
        """Whole tensors on every rank, (old, new), where those in pieces cannot simply be filled. Collective; the
        process group may be another than the one in which they were divided."""
        from nbtrain.strategies.kit.owned_tensors import full_tensor

        pairs: list[tuple[Any, Any]] = []
        for held in self._held:
            device = held.tensor.device
            whole = full_tensor(held.piece, on_the_wire(held.tensor) if self.world_size > 1 else device).to(device)
            if type(held.tensor) in (torch.Tensor, torch.nn.Parameter):
                held.tensor.data = whole
            elif isinstance(held.tensor, torch.nn.Parameter):
                pairs.append((held.tensor, torch.nn.Parameter(whole, held.tensor.requires_grad)))
            else:
                pairs.append((held.tensor, whole))
        return pairs

    def forget(self) -> None:
        self.made_by_cells = []
        for known in self._held:
            self._rejoin(known)
        self._held = []

    def take_over(self) -> None:
        """Write what the notebook has sent into the pieces."""
        for known in self._held:
            if known.arrived is not None:
                known.piece.fill(known.arrived)
                known.arrived = None
                known.number = _number(known)

    def compare(self) -> None:
        """After a cell: mark the tensors that no longer are what the notebook has. Collective."""
        if not self._held:
            return
        flags = torch.zeros(len(self._held), dtype=torch.uint8)
        for i, known in enumerate(self._held):
            number = _number(known)
            flags[i] = number != known.number
            known.number = number
        if self.world_size > 1:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        for known, changed in zip(self._held, flags.tolist(), strict=True):
            known.changed = known.changed or bool(changed)

    def settled(self) -> None:
        """The notebook has them all."""
        for known in self._held:
            known.changed = False

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """In the rank that packs: at its end the others know that they need not send anything more."""
        self._announced = False
        try:
            yield
        finally:
            if not self._announced:
                self.announce([])

    def announce(self, laters: list[Later]) -> None:
        """Tell the other ranks which tensors will be fetched, in this order."""
        self._announced = True
        if self.world_size > 1:
            where = {id(known): i for i, known in enumerate(self._held)}
            dist.broadcast_object_list([[where[id(later.of)] for later in laters]], self.rank)

    def serve(self, lead: int) -> None:
        """In the other ranks: send the lead what it announces."""
        wanted: list[Any] = [None]
        dist.broadcast_object_list(wanted, lead)
        for index in wanted[0]:
            known = self._held[index]
            for _, flat in self._parts(known):
                dist.send(flat, lead)

    def return_freed_memory(self) -> None:
        """Gathering and freeing a model unit by unit leaves hundreds of megabytes of holes in the C library's heap."""
        if sys.platform == "linux":
            with suppress(AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)

    def _fetch(self, apart: SplitTensor) -> memoryview:
        """The whole tensor's bytes, on the rank that packs."""
        assert isinstance(apart, HeldPiece)
        if not apart.nbytes:
            return memoryview(b"")
        # A map of its own is freed once written; from the heap it would leave fragments.
        memory = mmap.mmap(-1, apart.nbytes)
        flat_tensor = torch.frombuffer(memory, dtype=apart.dtype, count=apart.tensor.numel())
        for (start, stop), flat in self._parts(apart):
            flat_tensor.view(torch.uint8)[start * apart.dtype.itemsize : stop * apart.dtype.itemsize].copy_(flat)
        for rank, ranges in enumerate(apart.ranges):
            for start, stop in ranges if rank != self.rank else ():
                if stop > start:
                    dist.recv(flat_tensor[start:stop].view(torch.uint8), rank)
        return memoryview(flat_tensor.view(torch.uint8).numpy())

    def _parts(self, known: HeldPiece) -> Iterator[tuple[tuple[int, int], Any]]:
        """As bytes, because gloo does not know every dtype."""
        for (start, stop), flat in zip(known.piece.ranges(), known.piece.read(), strict=True):
            if stop > start:
                if flat.device.type == "meta":
                    raise NotSupported(ON_META)
                data = flat.detach().to("cpu", known.dtype).contiguous()
                yield (start, stop), data.view(torch.uint8)

    def _exchange_ranges(self) -> None:
        mine: list[Ranges] = [list(known.piece.ranges()) for known in self._held]
        everybody: list[Any] = [mine]
        if self.world_size > 1:
            everybody = [None] * self.world_size
            dist.all_gather_object(everybody, mine)
        for i, known in enumerate(self._held):
            known.ranges = [ranges[i] for ranges in everybody]

    def _rejoin(self, known: HeldPiece) -> None:
        join(self.table, known.tensor, TENSOR)


def _number(known: HeldPiece) -> int:
    number = 0
    for flat in known.piece.read():
        number = zlib.crc32(b"%d" % checksum(flat.detach()), number)
    return number


def made_by_cell(values: Mapping[str, Any], known: set[int]) -> dict[str, list[Any]]:
    """Tensors in pieces that a cell has made, below these names. `known`: ids of those that are passed by."""
    tensors_of_name = {
        name: [t for t in tensors_below([value], _is_parted) if id(t) not in known] for name, value in values.items()
    }
    return {name: tensors for name, tensors in tensors_of_name.items() if tensors}


def tensors_below(values: Iterable[Any], wanted: Callable[[Any], bool]) -> list[Any]:
    """The wanted ones among these and in the containers and plain objects below them, in an order that ranks share."""
    by_id: dict[int, Any] = {}
    seen: set[int] = set()
    todo = list(values)[::-1]
    while todo:
        value = todo.pop()
        if wanted(value):
            by_id.setdefault(id(value), value)
        elif id(value) not in seen:
            if isinstance(value, dict):
                inner: Iterable[Any] = value.values()
            elif isinstance(value, (list, tuple, deque)):
                inner = value
            elif type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
                inner = vars(value).values()
            else:
                continue
            seen.add(id(value))
            todo.extend(list(inner)[::-1])
    return list(by_id.values())


def is_stage_tensor(value: Any) -> bool:
    of_kit = if_imported("nbtrain.strategies.kit.stage_tensor", "is_stage_tensor")
    return of_kit is not None and bool(of_kit(value))


def _is_parted(value: Any) -> bool:
    dtensor = if_imported("torch.distributed.tensor", "DTensor")
    return is_stage_tensor(value) or (dtensor is not None and isinstance(value, dtensor))


def _by_rows(tensor: Any) -> bool:
    """Whether it is divided as those are that a strategy knows, and stays so."""
    if is_stage_tensor(tensor):
        return False
    from nbtrain.strategies.kit.row_shards import by_rows  # it loads DTensor

    return by_rows(tensor)


def _pattern(names: list[str], identities: dict[str, list[int]]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(number, len(first)) for name in names for number in identities[name]]
