"""Where draws come from that are to be the same on every rank, as those of one process are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

RandomState = Callable[[torch.device], AbstractContextManager[None]]
_states: list[RandomState] = []


def draw_from(state: RandomState) -> None:
    """`state` is set by `training`: inside of `with state(device):` torch draws what one process would draw."""
    _states[:] = [state]


def shared_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Around a draw. Without `draw_from` the ranks' own random states are used, which are equal."""
    return _states[0](device) if _states else nullcontext()
