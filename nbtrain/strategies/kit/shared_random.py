"""Where draws come from that are to be the same on every rank, as those of one process are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

Stream = Callable[[torch.device], AbstractContextManager[None]]
_streams: list[Stream] = []


def draw_from(stream: Stream) -> None:
    """`training` knows where one process would stand: `with stream(device):` torch's default stream stands there."""
    _streams[:] = [stream]


def one_stream(device: torch.device) -> AbstractContextManager[None]:
    """Around a draw; as the ranks' streams stand, where nobody has said more."""
    return _streams[0](device) if _streams else nullcontext()
