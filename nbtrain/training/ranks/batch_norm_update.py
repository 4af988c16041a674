"""`update_bn`: running statistics that are counted anew, over a whole loader, without a backward.

Each rank has seen its share of the batches; the mean over the ranks is what one process counts. It is found by what the
function does, which a program may also have written itself: `reset_running_stats` and a loader to its end, without
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nbtrain.compat.modules import NORM_LAYER
from nbtrain.intercept import Listeners
from nbtrain.training.ranks.collectives import reduce


class Recounted:
    """Layers whose statistics were reset, until a loader has come to its end."""

    def __init__(self, active: Callable[[], bool]) -> None:
        self.active = active
        self.norms: list[Any] = []

    def begin(self) -> None:
        self.norms.clear()

    def listen(self, listeners: Listeners) -> None:
        listeners.listen(f"{NORM_LAYER}.reset_running_stats", "norms", self._reset)

    def _reset(self, old: Callable[[Any], None]) -> Callable[[Any], None]:
        def reset(norm: Any) -> None:
            old(norm)
            if not torch.is_grad_enabled() and self.active():
                self.norms.append(norm)

        return reset

    def share(self) -> None:
        """At the end of a loader. Collective, if there is anything to share."""
        if not self.norms or torch.is_grad_enabled():
            return
        norms, self.norms = self.norms, []
        for norm in norms:
            for buffer in (norm.running_mean, norm.running_var):
                if buffer is not None and norm.training and norm.num_batches_tracked:
                    buffer.copy_(reduce(buffer))
