"""Raises when ranks enter different collectives, or some enter none, instead of hanging.

A collective needs every rank, and all of them in the same order. A rank that leaves a loop early, passes over a batch
or calls `reduce` below `if rank == 0` breaks that: its peers would wait forever, or take sums of what does not belong
together. So each rank writes on a board which collective it enters, and that its cell has ended; and looks there what
the others have entered in the same place (`shared_board.py`): some microseconds per collective.

Watched are collectives of the default group, and of the groups into which a strategy divides all ranks, where each rank
meets its own when the others meet theirs. On a GPU a rank is stopped before it enters one, not while it waits.

While a cell runs on some ranks only, a collective of all of them is refused: the others will never come.
"""

from __future__ import annotations

import datetime
import inspect
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.base.errors import NotSupported
from nbtrain.compat.intercept import Listeners
from nbtrain.compat.replaced_functions import COLLECTIVES
from nbtrain.strategies.kit.collective_calls import (
    ALONE,
    MEETING,
    MESH,
    OTHER_LAYERS,
    OTHER_TENSORS,
    WHOLE,
    is_weight,
    subject,
    subject_name,
)
from nbtrain.worker.loop.shared_board import (
    CELL,
    COUNT,
    ENTERED,
    FILES,
    MARKS,
    PART,
    PLACES,
    WAITING,
    WATCHED,
    WIDTH,
    Board,
    collective,
    words,
)
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.measure.phases import PhaseTimer
from nbtrain.worker.parts import Part
from nbtrain.worker.ranks.training_threads import TrainingThreads

OF_ONE_SIZE = frozenset(WATCHED[:5])
"""The first argument has as many elements on every rank."""
TO_ONE = frozenset({"reduce", "gather", "scatter", "broadcast"})
"""With one rank at its root: of several groups that have the same, a strategy has one do it."""
GATHERS = frozenset({"all_gather_into_tensor", "all_gather_single"})
"""What a model in pieces does in its forward."""
UNITS = GATHERS | {"reduce_scatter_tensor", "reduce_scatter_single"}
ABOUT = WIDTH - 1
"""the word that says what the collective is for"""
FIRST_NS = 30_000_000
FIRST, SLICE = datetime.timedelta(microseconds=FIRST_NS / 1000), datetime.timedelta(seconds=0.2)
"""How long a rank waits before it says so on the board, and between two looks at the others from then on."""
NUMBER, REST = struct.Struct("q"), struct.Struct(f"{WIDTH - 1}q")


class CollectiveGuard(Part):
    """Compares a rank's collectives with those of the others."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        steps: Steps,
        phases: PhaseTimer,
        within: Callable[[], int],
        threads: TrainingThreads,
    ) -> None:
        """`within`: BACKWARD, STEP or 0, what the rank is in the middle of."""
        self.rank = rank
        self.world_size = world_size
        self.steps = steps
        self.phases = phases
        self.within = within
        self.threads = threads
        self.board: Board | None = None
        self.cell = self.count = 0
        self.others = [peer for peer in range(world_size) if peer != rank]

    def watch(self, board: Board | None, cell: int) -> None:
        """Before what a cell uses is set up. Called on every rank, also one that does not run the cell. `cell`: the
        same number on all of them."""
        self.cell, self.count = cell, 0
        self.board = board if self.world_size > 1 and dist.is_available() and dist.is_initialized() else None

    def end(self, ok: bool) -> None:
        """Write that the cell has ended, unless it failed, which the notebook says."""
        if self.board is not None and ok:
            self.board.parts[self.rank][COUNT] = self.count
            self.board.parts[self.rank][CELL] = self.cell
        self.board = None

    @property
    def open(self) -> bool:
        """Whether a cell runs on several ranks."""
        return self.board is not None

    def waits(self) -> str:
        """The collective in which this rank waits, in words; from any thread."""
        board = self.board
        wait = board.waits_in(self.rank, self.cell) if board is not None else None
        return "" if wait is None else collective(wait[1])

    def wrote(self, file: int, times: int) -> None:
        """Note that rank 0 has written this file for the `times`-th time in this cell."""
        if self.board is not None:
            part, at = self.board.parts[self.rank], PART - 2 * (1 + file % FILES)
            part[at + 1] = 0
            part[at] = file
            part[at + 1] = (self.cell << 32) + times

    def has_written(self, file: int, times: int) -> bool:
        assert self.board is not None
        part, at = self.board.parts[0], PART - 2 * (1 + file % FILES)
        return part[at + 1] - (self.cell << 32) >= times and part[at] == file

    def past_us(self) -> bool:
        """Whether rank 0 is in a collective that this rank has not reached yet, or at the end of its cell."""
        assert self.board is not None
        part, following = self.board.parts[0], self.count + 1
        return part[CELL] == self.cell or part[MARKS + following % PLACES * WIDTH] == (self.cell << 32) + following

    def listen(self, listeners: Listeners) -> None:
        if self.world_size > 1 and dist.is_available():
            for name in WATCHED:
                listeners.listen(f"torch.distributed.{name}", "collective_guard", self._watched(name))
            # Every wait of Python code comes through it.
            listeners.listen("torch.distributed.distributed_c10d.Work.wait", "collective_guard", self._timed)

    def _timed(self, old: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.phases.wait()
            try:
                return old(*args, **kwargs)
            finally:
                self.phases.resume(before)

        return timed

    def _watched(self, name: str) -> Callable[[Any], Any]:
        code, sized, parallel = WATCHED.index(name), name in OF_ONE_SIZE, name not in TO_ONE

        def make(old: Any) -> Any:
            names = list(inspect.signature(old).parameters)
            at_group, at_async = names.index("group"), names.index("async_op")

            def watched(*args: Any, **kwargs: Any) -> Any:
                group = args[at_group] if len(args) > at_group else kwargs.get("group")
                if self.board is None or not _is_watched(group, parallel):
                    return old(*args, **kwargs)
                first = args[0] if args else next((v for k, v in kwargs.items() if k in names[:2]), None)
                tensor = first if isinstance(first, torch.Tensor) else None
                place = self._enter(code, tensor.numel() if sized and tensor is not None else 0)
                on_gpu = tensor.is_cuda if tensor is not None else dist.get_backend() != "gloo"
                if on_gpu or len(args) > at_async:
                    return old(*args, **kwargs)
                later = kwargs.pop("async_op", False)
                work = old(*args, **kwargs, async_op=True)
                if work is None:
                    return None
                patient = GuardedWork(work, self.board.parts[self.rank], lambda: self._look(place))
                return patient if later else patient.wait() and None

            return watched

        return make

    def _enter(self, code: int, size: int) -> tuple[int, ...]:
        assert self.board is not None
        self.count += 1
        self.board.parts[self.rank][ENTERED] = self.count
        place = (
            (self.cell << 32) + self.count, code, size, self.within(),
            self.steps.calls, *self.steps.place(), subject[0],
        )  # fmt: skip
        at = Board.at(self.rank) + 8 * (MARKS + self.count % PLACES * WIDTH)
        REST.pack_into(self.board.memory, at + 8, *place[1:])
        NUMBER.pack_into(self.board.memory, at, place[0])  # the last: until then nobody takes it for this one
        self._look(place)
        return place

    def _look(self, mine: tuple[int, ...]) -> None:
        """Raise if a peer has entered another collective here, or ended."""
        if self.board is None:
            return
        if self.threads.refused is not None:
            self.threads.check()
        count = mine[0] & 0xFFFFFFFF
        at = MARKS + count % PLACES * WIDTH
        for peer in self.others:
            part = self.board.parts[peer]
            if part[at] == mine[0]:
                theirs = tuple(part[at : at + WIDTH])
                if theirs != mine and _apart(mine, theirs) and part[at] == mine[0]:
                    raise self.threads.remembered(NotSupported(_gone_apart({self.rank: mine, peer: theirs})))
            elif part[CELL] == self.cell and part[COUNT] < count:
                raise NotSupported(
                    f"rank {peer} has come to the end of the cell, and rank {self.rank} is still {_way(mine)}: it "
                    f"would wait forever. {ALL}. Leave a loop together: `if reduce(loss) < limit: break`; and call "
                    "reduce and gather on every rank, not below `if rank == 0:`"
                )


def _is_watched(group: Any, parallel: bool) -> bool:
    """The default group, or one of a set (`collective_calls.MESH`) that together has all ranks."""
    everybody = group is None or group is dist.group.WORLD
    return everybody or (parallel and str(getattr(group, "group_desc", "")).startswith(MESH))


class GuardedWork:
    """A `Work` whose `wait` can be interrupted, and checks now and then whether the others still come."""

    def __init__(self, work: Any, part: Any, look: Callable[[], None]) -> None:
        self.work = work
        self.part = part
        self.look = look

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if timeout is not None:
            return bool(self.work.wait(timeout))
        began = 0
        try:
            while True:
                try:
                    return bool(self.work.wait(SLICE if began else FIRST))
                except RuntimeError:
                    if self.work.is_completed():  # it has failed, or came to its end just after this slice of time
                        return bool(self.work.wait())
                if not began:
                    began = self.part[WAITING] = time.monotonic_ns() - FIRST_NS
                self.look()
        finally:
            if began:
                self.part[WAITING] = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


ALL = "Backward, reduce, gather, barrier, setup and whole need every rank, and all of them in the same order"


ANOTHER = (
    "gradients are averaged over all ranks, model by model: train the same models on every rank, in the same order, "
    "and choose among them by what all ranks know (a seed that they share, reduce(value))"
)


def _apart(mine: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    if mine[1:4] != theirs[1:4] or mine[ABOUT] != theirs[ABOUT]:
        return True
    if not mine[3]:
        return False
    # A loader that only one rank iterates is another one; its length is nearly always another, too.
    same = mine[5] > 0 < theirs[5] and mine[6] == theirs[6]
    return mine[4] != theirs[4] or (same and mine[5:] != theirs[5:])


def _other_subjects(place: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether they do the same, at the same place in their loops, with different layers or models."""
    return place[ABOUT] > 0 < other[ABOUT] != place[ABOUT] and place[1] == other[1] and place[3:ABOUT] == other[3:ABOUT]


DRAWN = (
    "the ranks draw the order of their batches from different numbers, and would not share the data out: a loader was "
    "iterated on some ranks only, or a seed was set that depends on the rank. Iterate it on every rank (each sees its "
    "share; reduce brings the results together), or let it draw from numbers of its own: "
    "DataLoader(..., generator=torch.Generator())"
)


def _way(place: Sequence[int]) -> str:
    if place[ABOUT] == WHOLE:
        return f"in {subject_name(WHOLE)}" + words(place).partition(collective(place))[2]
    return words(place)


def _gone_apart(places: dict[int, tuple[int, ...]]) -> str:
    # This rank comes first: each says it in its own way, by which the notebook knows that they are out of step.
    here, other = places.values()
    if _other_subjects(here, other):
        on = ", ".join(f"rank {rank} {subject_name(place[ABOUT])}" for rank, place in places.items())
        known = all(is_weight(place[ABOUT]) for place in places.values())
        if known or here[2] == MEETING:
            on = on if known else " another than ".join(f"rank {rank}" for rank in places)
            return f"the ranks read different tensors, {on}: {OTHER_TENSORS}"
        what = OTHER_LAYERS if WATCHED[here[1]] in UNITS else ANOTHER
        return f"the ranks ran different layers, or the same in another order: {on}; {what}"
    ways = ", ".join(f"rank {rank} is {_way(place)}" for rank, place in places.items())
    if here[:7] == other[:7] and here[3]:  # at the same batch of loaders that were not iterated alike
        return f"rank {next(iter(places))}: {DRAWN}"
    if here[3] and other[3]:
        hint = (
            "A rank has passed over a batch or a backward that the others did: write `loss = loss * 0` and go on to "
            "backward and step in place of `continue`, or decide together: `if reduce(float(bad), 'max'): continue`"
        )
    else:
        hint = (
            "Leave a loop together: `if reduce(loss) < limit: break`; and reduce on every rank, not below "
            "`if rank == 0:`"
        )
        if here[3] or other[3]:  # a backward that the other rank has left out, perhaps
            hint += ". Where a rank has no loss for a batch, write `loss = loss * 0` and go on to backward and step"
    whats = {(WATCHED[place[1]], place[2]) for place in (here, other) if not place[3]}
    if ("all_reduce", MEETING) in whats:
        hint = (
            "What is in pieces is saved, and read as a number, by all ranks together under fsdp and pipeline: write it "
            "above `if rank == 0:`. Under --strategy ddp one rank can do it alone"
        )
    elif any(what in GATHERS for what, _ in whats):
        hint += f". {ALONE}"
    return f"the ranks have gone different ways: {ways}. {ALL}. {hint}"


@contextmanager
def only(ranks: Sequence[int], world_size: int) -> Iterator[None]:
    """Refuse what needs every rank, unless all of them run the cell. Groups of the user's own are his business."""
    if len(ranks) == world_size:
        yield
        return
    listeners = Listeners()
    try:
        for name in COLLECTIVES:
            listeners.listen(f"torch.distributed.{name}", "subset", _refusing(name, ranks))
        yield
    finally:
        listeners.close()


def _refusing(name: str, ranks: Sequence[int]) -> Callable[[Any], Any]:
    def make(old: Any) -> Any:
        parameters = list(inspect.signature(old).parameters)
        at = parameters.index("group") if "group" in parameters else len(parameters)

        def collective(*args: Any, **kwargs: Any) -> Any:
            group = args[at] if len(args) > at else kwargs.get("group")
            if group is not None and group is not dist.group.WORLD:
                return old(*args, **kwargs)
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
            raise NotSupported(
                f"{name} needs every rank, and this cell runs on {where} only: it would wait forever. Training, "
                "reduce, gather and barrier belong in a %%distributed cell"
            )

        return collective

    return make
