"""Random numbers of a rank's own, where several ranks see the same batch and so draw the same numbers otherwise.

Inside of a model ranks work on different samples, or layers: dropout is to differ there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class OwnRandom:
    """Inside of `with random_state():` torch draws from this state, and afterwards from the one it had."""

    def __init__(self, number: int) -> None:
        """`number`: of this rank among those that see the same batch; 0 draws from the state that there is."""
        self.number = number
        self.states: list[torch.Tensor] = []

    def begin(self) -> None:
        """A cell begins: from where all stand at the first use."""
        self.states = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if not self.number:
            yield
            return
        outside = _capture()
        if self.states:
            _restore(self.states)
        else:
            seed = outside[0].numpy().tobytes() + self.number.to_bytes(4, "little")
            torch.manual_seed(int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little") >> 1)
        try:
            yield
        finally:
            self.states = _capture()
            _restore(outside)


def _capture() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return states


def _restore(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
