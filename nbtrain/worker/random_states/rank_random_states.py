"""Decides which random numbers a rank draws.

A cell begins with the ranks *together*: each draws what one process would draw, so that a model that is made there, a
`random_split` or a permutation is the same on all of them. From its first batch or backward on they are *apart*: each
has default random states of its own, so that dropout and augmentation differ. Rank 0's carry on; the others' are
derived from where all stood. Where all see the same batches (pipeline) they stay together: outside of models, which
have random states of their own, a loop draws what one process does. There a rank that draws alone, below
`if rank == 0:`, would shuffle otherwise than the others from then on, which the next call of a model sees.

Beside them each rank has a *shared* state, equal on all ranks. It is swapped in while a loader draws its base seed and
its order, so that shuffling is what one process with the same seed would see, and the rank's own state stays as it is.

`torch.manual_seed` sets the shared state anew, as it would in one process; from the next loader on, the ranks' own
states are derived from it, so that dropout differs again. To see it even when the same seed is set again, the seed
that torch remembers beside its state is replaced by a mark while the ranks are apart. After each such seed it is
another mark: a state from before it that is set again (`fork_rng`) brings its own shared state back.

All of it follows from the notebook's random states when the cell begins.

A checkpoint has every rank's states, and those of one process. On as many ranks as before each goes on with its own. On
another number they start from where rank 0 stood, as at the beginning of a cell.
"""

from __future__ import annotations

import hashlib
import random
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.compat.intercept import Listeners
from nbtrain.compat.tensors import seed_in
from nbtrain.strategies.kit.random_draws import draw_from
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.random_states.default_generators import States, capture, packed, restore, unpacked

MARK = 0x6E62747261696E
"""What `torch.initial_seed()` says on a rank until the cell sets a seed of its own; then one more."""
REMEMBERED = 32
"""marks whose shared state can be brought back"""
STREAMS = "streams"
"""The key of random states in checkpoints, as all versions write it."""
KEPT = ("shared_states", "began", "seed", "cuda_seed", "mark", "last_mark", "left", "is_together")
"""The attributes of `Randomness` that a checkpoint has."""


def derive(state: Any, rank: int) -> int:
    """A seed of 63 bits that belongs to this state and rank."""
    digest = hashlib.blake2b(_content(state) + rank.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _content(state: Any) -> bytes:
    """Every byte of a state: `repr` abbreviates arrays, and takes a hundred times as long."""
    if isinstance(state, torch.Tensor):
        return state.cpu().numpy().tobytes()
    if isinstance(state, tuple):
        if len(state) > 9:  # the numbers of Python's own generator
            return array("Q", state).tobytes()
        return b"".join(map(_content, state))
    return state.tobytes() if hasattr(state, "tobytes") else repr(state).encode()


class Randomness(Part):
    """The random states of one rank. `adopt` before a cell, `collect` after it.

    `index`: the number of the rank's share of the batches. Ranks with the same share draw the same numbers.
    """

    def __init__(self, rank: int, world_size: int, cuda: bool = False) -> None:
        self.rank = self.index = rank
        self.world_size = world_size
        self.alike = False
        """all ranks see the same batches, and draw the same numbers outside of models"""
        self.alone = world_size == 1
        """one process; false in one that stands for several, where dropout does not move the loaders' order either"""
        self.cuda = cuda
        self.shared_states: States = {}
        self.began: States = {}
        self.seed: int | None = None  # what the notebook's torch remembers as its seed
        self.cuda_seed: int | None = None
        self.mark = self.last_mark = MARK
        self.left: dict[int, tuple[torch.Tensor, torch.Tensor, int | None]] = {}
        self.depth = 0
        self.as_one = False
        """torch draws what one process would, in a context of it"""
        self.is_together = False
        self.known: States | None = None  # the states that the notebook knows
        self._ended: States | None = None
        """where the rank stood when the cell ended, if that was read"""
        self.printed: tuple[Any, int] = (None, 0)  # a state, and its fingerprint

    def adopt(self, states: States) -> None:
        """Start from the notebook's random states. Called with the same states on every rank."""
        self.is_together = False  # a cell that was given up has not come to its end
        self.shared_states = {key: _copy(state) for key, state in states.items() if key != "cuda"}
        if self.index == 0:
            restore(states)
        else:
            self._seed(states)
        self._adopt_cuda(states)
        if not self.alone:
            self._mark()
        self.began = self.known = capture()

    def adopt_packed(self, states: States) -> None:
        """Start from what the notebook has sent. What it has not loaded yet starts from the rest."""
        states = unpacked(states)
        # Not this rank's own: where that stands after an earlier cell is another place on every rank.
        if "torch" not in states:
            states["torch"] = torch.Generator().get_state()
        if "numpy" not in states:
            import numpy

            seed = random.Random(repr(states["random"])).randrange(2**32)
            states["numpy"] = numpy.random.RandomState(seed).get_state(legacy=True)
        self.adopt(states)

    def listen(self, listeners: Listeners) -> None:
        draw_from(self.one_process)

    def begin(self, cell: Cell) -> None:
        self._ended = None
        if cell.record is not None and cell.record.keeps_order():
            self.alone = False
        if cell.managed:
            self.together()

    def end(self, ok: bool) -> None:
        self.apart(over=True)
        self.alone = self.world_size == 1

    def together(self) -> None:
        """Draw from the shared state."""
        if not self.alone and self.shared_states and not self.is_together:
            restore(self.shared_states)
            self.is_together = True

    def apart(self, over: bool = False) -> None:
        """Draw from states of this rank's own, derived from the shared ones. `over`: the cell has ended."""
        if self.is_together and (over or not (self.alike or self.as_one)):
            self.is_together = False
            states = capture()
            self.shared_states = {key: state for key, state in states.items() if key in self.shared_states}
            if self.index:
                self._seed(self.shared_states)
            marked = self._mark()
            # Rank 0 goes on from the shared states, but for the mark.
            self.began = capture() if self.index else {**self.shared_states, "torch": marked}
            self._ended = {**states, **self.began} if over else None

    def collect(self) -> States | None:
        """The notebook's random states from now on (meant for rank 0): the shared ones if only loaders drew, else this
        rank's own. None: nothing was drawn since they were last adopted or collected."""
        states, self._ended = self._ended or capture(), None
        if (
            self.known is not None
            and states.keys() == self.known.keys()
            and all(_same(states[key], self.known[key]) for key in states)
        ):
            return None
        self.known = dict(states)
        if self.alone:
            return states
        for key, shared in self.shared_states.items():
            if key in states and key in self.began and _same(states[key], self.began[key]):
                states[key] = _copy(shared)
        seed = seed_in(states["torch"])
        if self.seed is not None and MARK <= seed.item() <= self.last_mark:
            seed.fill_(self.seed)
        return states

    def collect_packed(self) -> States | None:
        """`collect`, to be sent to the notebook."""
        states = self.collect()
        return None if states is None else packed(states)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Inside, draws come from the shared state and not from the rank's own."""
        if self.alone or self.depth or self.is_together or not self.shared_states:
            self.depth += 1
            try:
                yield
            finally:
                self.depth -= 1
            return
        if torch.initial_seed() != self.mark and not self.as_one:
            self._follow(torch.initial_seed())
        keys = self.shared_states.keys() - ({"torch"} if self.as_one else set())
        own = {key: state for key, state in capture().items() if key in keys}
        restore({key: self.shared_states[key] for key in keys})
        self.depth += 1
        self.known = None
        try:
            yield
        finally:
            self.depth -= 1
            self.shared_states.update({key: state for key, state in capture().items() if key in keys})
            if self.index == 0 and "torch" in own and torch.equal(own["torch"], self.began["torch"]):
                # Nothing but loaders drew: this rank goes on as one process would, with a model made after an epoch.
                own["torch"] = self.began["torch"] = _with_seed(self.shared_states["torch"], self.mark)
            restore(own)

    def one_process_state(self) -> torch.Tensor:
        """torch's state in one process, as far as this rank knows: rank 0 makes its models from its own state."""
        if self.is_together or self.as_one:
            return torch.get_rng_state()
        with self.shared():
            pass  # the cell may have set a seed
        state = torch.get_rng_state()
        shared: torch.Tensor = self.shared_states["torch"]
        if torch.equal(state, self.began["torch"]):
            return shared.clone()
        return _with_seed(state, int(seed_in(shared).item()))

    def set_one_process_state(self, state: torch.Tensor) -> None:
        """Set the shared state to this one, the same on every rank."""
        if self.is_together or self.as_one:
            torch.set_rng_state(state)
            return
        self.shared_states["torch"] = state
        self.known = None
        if self.index == 0:
            own = _with_seed(state, self.mark)
            torch.set_rng_state(own)
            self.began["torch"] = own

    def drew(self) -> bool:
        """Whether this rank drew numbers of its own since the ranks went apart."""
        if self.alone or self.is_together or "torch" not in self.began:
            return False
        return not torch.equal(torch.get_rng_state(), self.began["torch"])

    @contextmanager
    def one_process(self, device: torch.device) -> Iterator[None]:
        """Inside, every rank draws what one process would: from rank 0's state, which moves on; the other ranks' own
        states stay as they are. Collective."""
        if device.type == "cuda":
            own = torch.cuda.get_rng_state(device)
            torch.cuda.set_rng_state(_of_rank_0(own), device)
            try:
                yield
            finally:
                if self.rank:
                    torch.cuda.set_rng_state(own, device)
            return
        if self.alone or self.as_one or not self.shared_states:
            yield
            return
        state = None if self.is_together else _of_rank_0(self.one_process_state())
        own = torch.get_rng_state()
        self.as_one = True
        if state is not None:
            torch.set_rng_state(state)
        try:
            yield
        finally:
            self.as_one = False
            if state is not None:
                reached = torch.get_rng_state()
                torch.set_rng_state(own)
                self.set_one_process_state(reached)

    @contextmanager
    def as_one_process(self) -> Iterator[None]:
        """`one_process` on all devices that this rank draws on. Collective."""
        with ExitStack() as stack:
            for kind in ("cpu", "cuda") if self.cuda else ("cpu",):
                stack.enter_context(self.one_process(torch.device(kind)))
            yield

    def fingerprint(self) -> int:
        """A number that is equal on all ranks as long as they have iterated the same loaders."""
        if not self.shared_states:
            return 0
        state = self.shared_states["torch"]
        if state is not self.printed[0]:  # it is another object whenever it has moved
            self.printed = state, derive(state, 0)
        return self.printed[1]

    # --- in a checkpoint -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs."""
        values = {name: getattr(self, name) for name in KEPT}
        values |= {name: dict(value) for name, value in values.items() if isinstance(value, dict)}
        return {"kept": values, STREAMS: capture()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for name, value in saved["kept"].items():
            setattr(self, name, dict(value) if isinstance(value, dict) else value)
        restore(saved[STREAMS])
        self.known, self.printed = None, (None, 0)  # the notebook does not know of these

    def notebook_states(self) -> States:
        """The notebook's random states if the cell ended here (on rank 0)."""
        if self.alone or self.is_together:
            return capture()
        known, self.known = self.known, None
        try:
            return self.collect() or capture()
        finally:
            self.known = known

    def go_on(self, world_size: int, one_process: States, ranks: Sequence[Any]) -> None:
        """Go on from a checkpoint: `notebook_states`, and the `state_dict` of each rank (None where none saved)."""
        if len(ranks) == world_size and None not in ranks:
            self.load_state_dict(ranks[self.rank])
            return
        self.is_together = False
        self.adopt(one_process)
        self.together()
        self.known = None

    # --- its parts -------------------------------------------------------------------------------

    def _seed(self, states: States) -> None:
        if "torch" in states:
            torch.default_generator.manual_seed(derive(states["torch"], self.index))
        if "random" in states:
            random.seed(derive(states["random"], self.index))
        if "numpy" in states and (numpy := sys.modules.get("numpy")):
            numpy.random.seed(derive(states["numpy"], self.index) % 2**32)

    def _adopt_cuda(self, states: States) -> None:
        """A notebook without CUDA sends no state of it: then its seed is set once."""
        if not self.cuda:
            return
        if "cuda" in states:
            if self.index:
                torch.cuda.manual_seed(derive(states["cuda"], self.index))
            else:
                torch.cuda.set_rng_state(states["cuda"])
            return
        seed = int(seed_in(states["torch"]).item())
        if seed != self.cuda_seed:
            self.cuda_seed = seed
            torch.cuda.manual_seed(derive(seed, self.index) if self.index else seed)

    def _follow(self, seed: int) -> None:
        """The cell has set a seed on every rank, or a state from before one: follow in the shared state."""
        self.left[self.mark] = self.shared_states["torch"], self.began["torch"], self.seed
        self.left = dict([*self.left.items()][-REMEMBERED:])
        if seed in self.left:
            self.mark = seed
            self.shared_states["torch"], self.began["torch"], self.seed = self.left.pop(seed)
            return
        state = self.shared_states["torch"] = torch.get_rng_state()
        if self.index:  # from here on their own draws differ again
            torch.default_generator.manual_seed(derive(state, self.index))
            if torch.cuda.is_initialized():
                torch.cuda.manual_seed(derive(state, self.index))
        self.last_mark += 1
        self.mark = self.last_mark
        self._mark()
        self.began["torch"] = torch.get_rng_state()

    def _mark(self) -> torch.Tensor:
        """Returns torch's state with the mark."""
        state = torch.get_rng_state()
        seed = seed_in(state)
        if self.index == 0:
            self.seed = int(seed.item())
        seed.fill_(self.mark)
        torch.set_rng_state(state)
        return state


def _of_rank_0(state: torch.Tensor) -> torch.Tensor:
    if not dist.is_initialized():  # one process that stands for several
        return state.clone()
    on = "cuda" if dist.get_backend() == dist.Backend.NCCL else "cpu"
    sent = state.to(on, copy=True)
    dist.broadcast(sent, src=0)
    return sent.to(state.device)


def _with_seed(state: torch.Tensor, seed: int) -> torch.Tensor:
    changed = state.clone()
    seed_in(changed).fill_(seed)
    return changed


def _copy(state: Any) -> Any:
    return state.clone() if isinstance(state, torch.Tensor) else state


def _same(state: Any, other: Any) -> bool:
    if state is other:
        return True
    if isinstance(state, torch.Tensor):
        return torch.equal(state, other)
    return repr(state) == repr(other) if not isinstance(state, tuple) else all(map(_equal, state, other))


def _equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    answer = value == other
    return bool(answer.all() if hasattr(answer, "all") else answer)
