"""All ranks of a cell end at the same step when it is stopped.

A *step* ends when the optimizers used since the last end have stepped, or been passed over by a GradScaler. A rank
notices that it has ended when the next batch is asked for, or, while no loader is in use, when the next backward
begins: gradients are zeroed by then, and schedulers have moved. There it says how many steps have ended *and then*
looks whether it is to stop. If so it waits until the kernel has said after which step.

The kernel sets the stop word, lets that become visible, and reads what all have said: the largest number, and one more,
is the step after which all stop. A rank that did not see the word at the end of step k is on its way to the end of step
k + 1, where it will. So that step is reached by all and passed by none, whatever collectives they wait in. Ranks that
do not wait for each other (`none`) may be far apart: then each stops at the end of its own step.

Where nothing is under way (no backward since the last step ended: an evaluation, or before the first step), there is
nothing to agree on, and a rank stops at its next batch.

Only the main thread is stopped here; a loader that another thread iterates runs ahead of the training.

In the same way the ranks of a run in the background agree on the step after which they put their weights aside for the
notebook (training/checkpoints/live_weights.py), and go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nbtrain.training.loop.shared_board import (
    ASIDE,
    ASIDE_AT,
    ENTERED,
    OPEN,
    RAISED,
    STEPS,
    STOP,
    TARGET,
    UNKNOWN,
    WAITING,
    WISHES,
    Board,
)
from nbtrain.training.loop.steps import Steps

PAUSE = 0.0005


class Stopped(KeyboardInterrupt):
    """Raised where nothing is under way."""


class Enough(BaseException):
    """Raised where the last step of a trial has ended: on every rank after the same one, for all count alike. It is no
    Stop, for which the loop may have something to do."""


class Stopping:
    """The rank's part in it. `begin` before a cell; then `steps` calls."""

    def __init__(self, rank: int, steps: Steps) -> None:
        self.rank = rank
        self.steps = steps
        self.put_aside: Callable[[int], None] = lambda request: None
        self.enough: Callable[[], bool] = _never
        """is told of each step that ends, and says whether it is the last"""
        self._board: Board | None = None
        self._run = 0
        self._aside = 0
        """the last wish that was met"""
        steps.ended = self._ended
        steps.between = self._between

    def begin(self, board: Board | None, run: int) -> None:
        self._board, self._run = board, run
        if board is not None:
            part = board.parts[self.rank]
            part[STEPS] = part[ENTERED] = part[WAITING] = 0
            part[OPEN] = run
            self._aside = run * WISHES

    def end(self) -> None:
        self._board = None
        self.enough = _never

    def _ended(self) -> None:
        """A step has ended."""
        board = self._board
        if board is None:
            return
        part = board.parts[self.rank]
        if self.enough():
            self._raise(board, Enough)
        part[STEPS] = self.steps.ends  # said first, and then looked: one of both sides sees the other
        if board.head[ASIDE] > self._aside and self._due(board, ASIDE_AT):
            self._aside = board.head[ASIDE]
            self.put_aside(self._aside)
        if board.head[STOP] == self._run and self._due(board, TARGET):
            self._raise(board)

    def _due(self, board: Board, word: int) -> bool:
        while board.head[word] == UNKNOWN:  # nobody passes while it is being chosen
            time.sleep(PAUSE)
        return self.steps.ends >= board.head[word]

    def _between(self) -> None:
        """Nothing is under way."""
        if self._board is not None and self._board.head[STOP] == self._run:
            self._raise(self._board)

    def _raise(self, board: Board, how: type[BaseException] = Stopped) -> None:
        part = board.parts[self.rank]
        if part[RAISED] != self._run:
            part[RAISED] = self._run
            raise how


def _never() -> bool:
    return False
