"""Ends the ranks of a run: asks them, interrupts them, frees them from each other, and at last gives them up.

*Stop.* All ranks are asked to end after the same step (`worker/loop/stopping.py`). Where none has finished a step
there is nothing to agree on, and they are interrupted at once. A rank that is not at the end of a step within PATIENCE
is interrupted where it is. No rank is given up: that takes a second press (base/keyboard_interrupts.py counts them).

*A rank failed, died or has ended by itself.* Its peers may wait for it in a collective. They have PEERS_END seconds to
end by themselves; then they are interrupted, and if that does not help their collectives are given up. After a failure
they are given up at once where nothing can come of them: each peer has waited for a MOMENT, in a collective that some
rank which has ended never entered. A rank that has still not ended is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nbtrain.base.awake_time import Stopwatch
from nbtrain.engines.base import Pool
from nbtrain.worker.loop.shared_board import ABORT, ENTERED, OPEN, STEPS, STOP, TARGET, UNKNOWN

PEERS_END = 0.3
MOMENT = 50_000_000
"""Nanoseconds that a peer must have waited: a collective that all have entered may take as long."""
AGAIN = 0.15
"""Between one interrupt and the next; with the second, collectives are given up."""
GIVEN_UP = 0.9
"""Seconds after a failure in which a rank must have come to the end of the cell."""
SAID = 10.0
"""Seconds after a failure in which a rank that has must have said so: a traceback through much of torch takes one or
two on a busy machine, and so does packing."""
PATIENCE = 3.0
"""Seconds after Stop in which a step should end."""
SLOW = 2.0
"""Seconds after Stop from which the user is told what it waits for."""


class StopRanks:
    """Ends the ranks of one run."""

    def __init__(self, pool: Pool, number: int, tell: Callable[[set[int]], None]) -> None:
        """`tell` shows where these ranks are."""
        pool.board.head[TARGET] = UNKNOWN
        self.pool = pool
        self.number = number
        self.stopped = False
        self.gave_up = False
        """collectives were given up: the ranks' connections are shut"""
        self._tell = tell
        self._told = False
        self._since_stop: Stopwatch | None = None
        self._since_loss: Stopwatch | None = None
        self._since_interrupt: Stopwatch | None = None
        self._interrupts = 0

    def stop(self, running: set[int]) -> None:
        """The user pressed Stop."""
        self.stopped = True
        self._since_stop = Stopwatch()
        head = self.pool.board.head
        head[TARGET] = UNKNOWN
        head[STOP] = self.number
        self.pool.board.settle()
        parts = [self.pool.board.parts[rank] for rank in running]
        ended = [part[STEPS] if abs(part[OPEN]) == self.number else 0 for part in parts]
        most = max(ended, default=0)
        # Ranks two steps apart do not wait for each other: the slow ones may never come to the step of the fast ones,
        # so each stops at its next.
        head[TARGET] = most + 1 if most - min(ended, default=0) < 2 else 0
        if not most:
            self._interrupt(running)

    def waits(self, running: set[int]) -> dict[int, Any]:
        """What each of these ranks waits for at this moment, as the board tells; None: nothing."""
        return {rank: self.pool.board.waits(rank, self.number) for rank in running}

    def late(self, rank: int) -> None:
        """A rank starts only now, and has missed earlier interrupts."""
        if self._interrupts:
            self.pool.interrupt([rank])

    def tick(self, running: set[int], lost: bool, gone: bool) -> bool:
        """`lost`: some rank has failed or died, or one waits for another that Stop has ended. `gone`: because of a
        fault. Returns whether those that are still running are to be ended."""
        if lost and self._since_loss is None:
            self._since_loss = Stopwatch()
        loss = self._since_loss.seconds if self._since_loss is not None else 0.0
        stop = self._since_stop.seconds if self._since_stop is not None else 0.0
        if stop > SLOW and not self._told:
            self._told = True
            self._tell(running)
        in_vain = gone and self._in_vain(running)
        parts = self.pool.board.parts
        inside = (lost or stop > PATIENCE) and any(parts[rank][OPEN] != -self.number for rank in running)
        # Who has ended after Stop may wait for what a GPU has yet to do.
        if loss > PEERS_END or (stop > PATIENCE and inside) or in_vain:
            self._interrupt_again(running, in_vain)
        return gone and loss > (GIVEN_UP if inside else SAID)

    def _in_vain(self, running: set[int]) -> bool:
        """Whether each of them waits in a collective that some rank which has ended never entered."""
        parts = self.pool.board.parts
        entered = {rank: part[ENTERED] if abs(part[OPEN]) == self.number else 0 for rank, part in enumerate(parts)}
        fewest = min((entered[rank] for rank in entered.keys() - running), default=0)
        waits, since = self.waits(running), time.monotonic_ns() - MOMENT
        return all(wait is not None and wait[0] < since and entered[rank] > fewest for rank, wait in waits.items())

    def _interrupt_again(self, running: set[int], in_vain: bool) -> None:
        if self._since_interrupt is None or self._since_interrupt.seconds > AGAIN:
            if self._interrupts or in_vain:
                self.gave_up = True
                self.pool.board.head[ABORT] = self.number
            self._interrupt(running)

    def _interrupt(self, running: set[int]) -> None:
        self._since_interrupt = Stopwatch()
        self._interrupts += 1
        self.pool.interrupt(running)
