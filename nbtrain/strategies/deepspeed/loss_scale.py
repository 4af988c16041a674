"""The dynamic loss scale of half precision, one for all models of a strategy, as one backward may go through several.

It halves after a step in which some gradient was infinite (on any rank: DeepSpeed says so to all) and doubles after
2000 that were not, as torch's GradScaler does. It changes only while no gradients are held.
"""

from __future__ import annotations

INITIAL = 2.0**16
PATIENCE = 2000


class LossScale:
    """`begin` with each backward, `stepped` with each step."""

    def __init__(self) -> None:
        self.value = INITIAL
        self._next = INITIAL
        self._good = 0
        self.holding: set[int] = set()
        """whose gradients were made with `value`"""

    def begin(self) -> float:
        """A backward begins: what the loss is to be multiplied by."""
        if not self.holding:
            self.value = self._next
        return self.value

    def stepped(self, overflow: bool) -> None:
        if overflow:
            self._next, self._good = min(self._next, self.value / 2), 0
        else:
            self._good += 1
            if self._good >= PATIENCE:
                self._next, self._good = self.value * 2, 0
