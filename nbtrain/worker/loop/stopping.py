"""Makes all ranks end after the same step when a cell is stopped. What a rank does when it is interrupted in the middle
of one is in `process/interrupts.py`.

A rank notices that a step has ended (`steps.py`) when the next batch is asked for, or, while no loader is in use, when
the next backward begins. There it says how many steps have ended *and then* looks whether it is to stop. If so it waits
until the kernel has said after which step.

The kernel sets the stop word, lets that become visible, and reads what all have said: the largest number, and one more,
is the step after which all stop. A rank that did not see the word at the end of step k is on its way to the end of step
k + 1, where it will. So that step is reached by all and passed by none, whatever collectives they wait in. Ranks that
do not wait for each other (`none`) may be far apart: then each stops at the end of its own step. Where nothing is under
way (an evaluation, or before the first step), a rank stops at its next batch.

Only the main thread is stopped here; a loader that another thread iterates runs ahead of the training. In the same way
the ranks of a run in the background agree on the step after which they save their weights for the notebook
(`checkpoints/live_weights.py`), and go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nbtrain.worker.loop.shared_board import (
    ENTERED,
    OPEN,
    RAISED,
    REQUESTS,
    STEPS,
    STOP,
    TARGET,
    UNKNOWN,
    WAITING,
    WEIGHTS,
    WEIGHTS_AT,
    Board,
)
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.parts import Cell, Part

PAUSE = 0.0005


class Stopped(KeyboardInterrupt):
    """Raised between two steps, where nothing is half done."""


class TrialOver(BaseException):
    """Raised at the end of a trial's last step, the same on every rank. No KeyboardInterrupt, which the loop may
    handle."""


class Stopping(Part):
    """Raises on a rank at the step after which it is to stop: `steps` calls it."""

    def __init__(self, rank: int, steps: Steps) -> None:
        self.rank = rank
        self.steps = steps
        self.save_live_weights: Callable[[int], None] = lambda request: None
        self.trial_over: Callable[[], bool] = _never
        """called at the end of each step: whether it is the last"""
        self._board: Board | None = None
        self._run = 0
        self._request_met = 0
        """the last request that was met"""
        steps.ended = self._ended
        steps.between = self._between

    def begin(self, cell: Cell) -> None:
        self._board, self._run = cell.board, cell.number
        self.trial_over = _never if cell.trial is None else cell.trial.ended
        if cell.board is not None:
            part = cell.board.parts[self.rank]
            part[STEPS] = part[ENTERED] = part[WAITING] = 0
            part[OPEN] = cell.number
            self._request_met = cell.number * REQUESTS

    def end(self, ok: bool) -> None:
        self._board = None
        self.trial_over = _never

    def _ended(self) -> None:
        """A step has ended."""
        board = self._board
        if board is None:
            return
        part = board.parts[self.rank]
        if self.trial_over():
            self._raise(board, TrialOver)
        part[STEPS] = self.steps.ends  # said first, and then looked: one of both sides sees the other
        if board.head[WEIGHTS] > self._request_met and self._due(board, WEIGHTS_AT):
            self._request_met = board.head[WEIGHTS]
            self.save_live_weights(self._request_met)
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
