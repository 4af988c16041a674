"""Where ranks that see the same batch draw random numbers from: one state of all of them, or a rank's own.

Weights and edits are drawn alike on every rank, as one process draws them. Inside of a model ranks work on different
samples, or layers: dropout is to differ there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

AS_A_WEIGHT = "nbtrain_drawn_as_a_weight"
"""An attribute of classes of tensors that stand for weights in pieces: draws for them are those of one process."""

RandomState = Callable[[torch.device], AbstractContextManager[None]]
_shared: list[RandomState] = []


def draw_from(state: RandomState) -> None:
    """`state` is set by `training`: inside of `with state(device):` torch draws what one process would draw."""
    _shared[:] = [state]


def shared_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Around a draw. Without `draw_from` the ranks' own random states are used, which are equal."""
    return _shared[0](device) if _shared else nullcontext()


class OwnRandom:
    """Inside of `with random_state():` torch draws from this state, and afterwards from the one it had."""

    def __init__(self, number: int) -> None:
        """`number`: of this rank among those that see the same batch; 0 draws from the state that there is."""
        self.number = number
        self.states: list[torch.Tensor] = []

    def begin(self) -> None:
        """A cell begins: the first use derives the state from the one that all ranks have."""
        self.states = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self.number:
            yield
            return
        outside = captured()
        if self.states:
            _restore(self.states)
        else:
            seed = outside[0].numpy().tobytes() + self.number.to_bytes(4, "little")
            torch.manual_seed(int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little") >> 1)
        try:
            yield
        finally:
            self.states = captured()
            _restore(outside)


def captured() -> list[torch.Tensor]:
    """torch's random states: the CPU's, and the GPU's where one is in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _restore(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
