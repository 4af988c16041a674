"""The state of torch's generator of random numbers on the CPU. Nothing here imports torch.

Its form is documented nowhere; it is this in torch 2.8 to 2.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtrain.compat.internals import Internals

if TYPE_CHECKING:
    import torch

its = Internals("torch")
check = its.check

_SEED = 8
"""It begins with so many bytes that say what `torch.initial_seed()` will, and that no number is drawn from."""


def seed_in(state: torch.Tensor) -> torch.Tensor:
    """One number: what is written to it is what torch will remember as its seed."""
    import torch

    return state[:_SEED].view(torch.int64)


def without_seed(state: torch.Tensor) -> torch.Tensor:
    """All that numbers are drawn from."""
    return state[_SEED:]
