"""Saves how far `resumable` loops and their loaders are, and brings them there again.

A loader's place is counted in batches of its own sampler, whatever the number of ranks that share them. To get there
again the same order is drawn from the random states at the beginning of the epoch, the batches already seen are drawn
from the sampler and dropped (their samples are not loaded), and the random states are restored.
"""

from __future__ import annotations

import ast
import builtins
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.utils.data import DataLoader, IterableDataset

from nbtrain.compat import loaders as iterators
from nbtrain.worker.data.batch_dealing import dealt_out, following
from nbtrain.worker.data.loop_code import NOTHING, UserFrame, places
from nbtrain.worker.parts import Deal
from nbtrain.worker.random_states import default_generators
from nbtrain.worker.random_states.rank_random_states import STREAMS, Randomness


@dataclass(slots=True)
class LoaderPass:
    """One pass through a loader."""

    of: int | None
    """batches of its sampler"""
    each: int
    """of these, how many all ranks take at a time"""
    began: dict[str, Any]
    """random states from which its order was drawn"""
    iterator: Callable[[], Any] = lambda: None
    """a weak reference"""
    seen: int = 0
    """batches seen before it was resumed"""
    yielded: int = 0
    """the iterator's own count at that time"""
    over: bool = False

    def place(self) -> dict[str, Any]:
        alive = None if self.over else self.iterator()
        if alive is None:
            return {"seen": None}
        since = iterators.handed_out(alive) - self.yielded
        return {"seen": self.seen + since * self.each, "of": self.of, **self.began}


@dataclass(slots=True)
class ResumableLoop:
    """A `resumable` loop that is under way."""

    ordinal: int
    """its number among the loops at the same depth"""
    index: int = 0
    steps: int = 0
    """optimizer steps before the current item"""
    opened: list[LoaderPass] = field(default_factory=list)
    places: list[dict[str, Any]] = field(default_factory=list)
    """where the loaders of the first item begin"""


class LoopPositions:
    """All `resumable` loops of one rank, or of the notebook."""

    def __init__(self, randomness: Randomness | None, calls: Callable[[], int], say: Callable[[str], None]) -> None:
        """`randomness`: the rank's. `calls`: how many steps optimizers have taken so far."""
        self.randomness = randomness or Randomness(0, 1)
        self.calls = calls
        self.deal = Deal(index=0, count=1)
        self.shares = False
        self.patched = False
        """loaders ask `skipping` by themselves"""
        self.say = say
        self.noted: Callable[[], None] = lambda: None
        """called where a loop's item or a loader's pass begins, and where a loop is over"""
        self.loops: list[ResumableLoop] = []
        self.pending: list[dict[str, Any]] = []
        self._counts: dict[int, int] = {}
        self._skip: Callable[[Any], Skipping] | None = None

    def begin(self) -> None:
        """A cell begins. A checkpoint loaded in an earlier cell without such a loop still counts."""
        self.go_on(() if self.used else self.pending)

    def go_on(self, pending: Iterable[dict[str, Any]]) -> None:
        """Loops that begin from here on start at these positions."""
        self.pending = list(pending)
        self.loops.clear()
        self._counts.clear()

    @property
    def used(self) -> bool:
        """Whether a loop has begun since `go_on`."""
        return bool(self._counts)

    def state(self, in_a_step: bool = False) -> list[dict[str, Any]]:
        """The loops under way, the outermost first. `in_a_step`: the item under way is not over for certain; otherwise
        it is, if it has gone through a loader or taken a step, and no loader is under way."""
        places_of_loops: list[dict[str, Any]] = [{"ordinal": loop.ordinal, "index": loop.index} for loop in self.loops]
        depth = len(self.loops)
        following = {"ordinal": self._counts.get(depth, 0), "index": 0}
        if self.loops:
            last = self.loops[-1]
            places = [opened.place() for opened in last.opened]
            under_way = any(place["seen"] is not None for place in places)
            if not (under_way or in_a_step) and (places or self.calls() > last.steps):
                places_of_loops[-1]["index"] += 1
                return places_of_loops
            places_of_loops[-1]["loaders"] = places
        if following["ordinal"]:
            places_of_loops.append(following)
        return places_of_loops

    def loop(self, items: Iterable[Any]) -> Iterator[Any]:
        depth = len(self.loops)
        ordinal = self._counts.get(depth, 0)
        self._counts[depth] = ordinal + 1
        start, places = self._start(depth, ordinal)
        if start is None:
            return
        mine = ResumableLoop(ordinal, places=places)
        self.loops.append(mine)
        try:
            alone = isinstance(items, DataLoader)
            for i, item in enumerate((items,) if alone else items):
                if i < start:
                    continue
                if i > start:
                    del self.pending[depth:]
                    mine.places = []
                mine.index, mine.steps = i, self.calls()
                mine.opened.clear()
                self._counts = {at: n for at, n in self._counts.items() if at <= depth}
                if i > start or not places:  # else it stands in the middle of it
                    self.noted()
                if not alone:
                    yield item
                elif self.patched:
                    yield from item
                else:
                    yield from self.open(item, iter)
        finally:
            del self.pending[depth:]
            if mine in self.loops:
                del self.loops[self.loops.index(mine) :]
        self.noted()

    def _start(self, depth: int, ordinal: int) -> tuple[int | None, list[dict[str, Any]]]:
        """(first item, positions of its loaders). None: this loop was over before the checkpoint."""
        if depth >= len(self.pending):
            return 0, []
        saved = self.pending[depth]
        if ordinal < saved["ordinal"]:
            return None, []
        if ordinal > saved["ordinal"]:
            del self.pending[depth:]
            return 0, []
        return saved["index"], saved.get("loaders", [])

    # --- loaders ---------------------------------------------------------------------------------

    def open(self, loader: DataLoader[Any], make: Callable[[Any], Any]) -> Any:
        """Return `make(loader)`, moved to its saved position."""
        if not self.loops:
            return make(loader)
        loop = self.loops[-1]
        number = len(loop.opened)
        place = loop.places[number] if number < len(loop.places) else None
        of = _length(loader)
        if place is not None and place["seen"] and place.get("of") != of:
            self.say(
                f"the loader has {of} batches, and had {place.get('of')} when the checkpoint was made: it begins anew"
            )
            place = None
        each = self.deal.at_a_time if self.shares and dealt_out(loader) else 1
        if place is None or place["seen"] == 0:
            if place is not None and STREAMS in place:
                self._draw_again(loader, place)
            opened = LoaderPass(of, each, self._began(loader))
            iterator = make(loader)
        else:
            iterator = self._resume(loader, make, place)
            began = {key: place[key] for key in (STREAMS, "generators", "seeded") if key in place}
            opened = LoaderPass(of, each, began, over=place["seen"] is None)
            if (seen := place["seen"]) is not None:
                # As if it had handed out what was seen, so that it knows its last batch.
                opened.yielded = seen if of is None else -(-of // each) - (-(-max(0, of - seen) // each))
                opened.seen = seen
                iterators.set_handed_out(iterator, opened.yielded)
        opened.iterator = ref(iterator)
        loop.opened.append(opened)
        self.noted()
        return iterator

    def _draw_again(self, loader: DataLoader[Any], place: dict[str, Any]) -> None:
        """Its order is drawn from the same states again."""
        for generator, state in zip(_generators(loader), place.get("generators", ()), strict=False):
            generator.set_state(state)
        randomness = self.randomness
        if randomness.alone or randomness.is_together:
            default_generators.restore(place[STREAMS])
        else:
            randomness.shared_states = dict(place[STREAMS])

    def exhausted(self, iterator: Any) -> None:
        for loop in self.loops:
            for opened in loop.opened:
                if opened.iterator() is iterator:
                    opened.over = True

    def skipping(self, batches: Any) -> Any:
        """Return a batch sampler without the batches that were seen."""
        return batches if self._skip is None else self._skip(batches)

    def _began(self, loader: DataLoader[Any]) -> dict[str, Any]:
        randomness = self.randomness
        states = (
            default_generators.capture()
            if randomness.alone or randomness.is_together
            else dict(randomness.shared_states)
        )
        states.pop("cuda", None)
        # Workers that live on keep the seed that their loader drew when it was first iterated.
        seeded = iterators.running(loader) is None
        return {STREAMS: states, "generators": [made.get_state() for made in _generators(loader)], "seeded": seeded}

    def _resume(self, loader: DataLoader[Any], make: Callable[[Any], Any], place: dict[str, Any]) -> Any:
        randomness = self.randomness
        before = randomness.state_dict()
        seen = place["seen"]
        made: list[Skipping] = []

        def skip(batches: Any) -> Skipping:
            made.append(Skipping(batches, seen, (lambda: _rewind(loader, place)) if seen is not None else lambda: None))
            return made[-1]

        self._skip = skip
        try:
            if seen is not None:
                self._draw_again(loader, place)
            iterator = make(loader)
            with randomness.shared():
                for sampler in made:
                    sampler.catch_up()
            if not self.patched or isinstance(loader.dataset, IterableDataset):
                with randomness.shared():
                    _drop(iterator, seen)
            return iterator
        finally:
            self._skip = None
            for sampler in made:  # workers that live on begin the next epoch with it, too
                sampler.seen, sampler.catch_up = 0, lambda: None
            randomness.load_state_dict(before)


class Skipping:
    """A batch sampler that leaves out its first batches.

    They are drawn when the first batch is asked for, or by `catch_up`: many samplers draw random numbers with their
    first batch, after the loader has drawn its own.
    """

    def __init__(self, batches: Any, seen: int | None, rewind: Callable[[], None]) -> None:
        """`rewind`: restores the random states from which the order was drawn."""
        self.batches = batches
        self.seen = seen
        self.rewind = rewind
        self.catch_up: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        inner, seen, rewind = iter(self.batches), self.seen, self.rewind

        def catch_up() -> None:
            nonlocal seen
            if seen != 0:
                skipped, seen = seen, 0
                rewind()
                deque(following(inner, skipped), maxlen=0)

        def begun() -> Iterator[Any]:
            catch_up()
            yield from following(inner)

        self.catch_up = catch_up  # a loader with workers begins twice
        return begun()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


def _rewind(loader: DataLoader[Any], place: dict[str, Any]) -> None:
    default_generators.restore(place[STREAMS])
    for generator, state in zip(_generators(loader), place["generators"], strict=False):
        generator.set_state(state)
    if place["seeded"]:
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as every loader does, first


def _drop(iterator: Any, seen: int | None) -> None:
    with suppress(StopIteration):
        for _ in range(seen) if seen is not None else iter(int, 1):
            iterators.pass_over(iterator)


def _length(loader: DataLoader[Any]) -> int | None:
    if isinstance(loader.dataset, IterableDataset):
        return None
    try:
        # or it has no length
        return len(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    holders = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    generators = [made for holder in holders if isinstance(made := getattr(holder, "generator", None), torch.Generator)]
    return list({id(made): made for made in generators}.values())


GOES_OVER = frozenset({"tqdm", "resumable", "track", "progress_bar"})
"""What goes over its first argument."""


def epoch_around(begun: int) -> tuple[int, int] | None:
    """(number from zero, how many), as the loop around a loader's iteration says; called below its `iter`. `begun`: its
    iterations in this cell before.

    `for epoch in range(60)`, `trange(epochs)`, `tqdm(range(10))`, `resumable(range(cfg.epochs))`, in the cell or in a
    function. The number is the loop variable's: a loader that is iterated twice in an epoch counts once, and a run that
    goes on in the middle of its loop is where it is. Where more than one loop is around, nothing is known. A loop
    around `iter(loader)` may count steps: it counts epochs if the loader is iterated with it from the first one on."""
    frames = places()
    its_own = frames[0].loop() if frames else None  # the one over the loader may stand in one line
    around = [(loop, here) for here in frames for loop in here.loops_around() if loop is not its_own]
    if len(around) != 1:
        return None
    loop, here = around[0]
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
        return None
    over, now = _range(loop.iter, here), here.value(loop.target)
    if over is None or type(now) is not int or now not in over:
        return None
    number = over.index(now)
    return (number, len(over)) if its_own is not None or number == begun else None


def _range(over: ast.expr, here: UserFrame) -> range | None:
    if not isinstance(over, ast.Call):
        value = here.value(over)
        value = getattr(value, "__dict__", {}).get("iterable", value)  # a progress bar that was given a name
        return value if isinstance(value, range) else None
    name = over.func.attr if isinstance(over.func, ast.Attribute) else getattr(over.func, "id", "")
    if name in GOES_OVER and over.args:
        return _range(over.args[0], here)
    if name != "trange" and (name != "range" or here.value(over.func) not in (builtins.range, NOTHING)):
        return None
    bounds = [here.value(argument) for argument in over.args]
    known = 0 < len(bounds) <= 3 and all(type(bound) is int for bound in bounds) and bounds[2:] != [0]
    return range(*bounds) if known else None
