"""Raises KeyboardInterrupt in a rank's cell, but never inside an optimizer step, a scheduler or a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import CodeType, FrameType, TracebackType
from typing import Any

from nbtrain.base.keyboard_interrupts import changing, uninterrupted
from nbtrain.worker.loop.shared_board import OPEN, RAISED, Board

PATHS = ("optim", "optimizer.py"), ("optim", "lr_scheduler.py"), ("amp", "grad_scaler.py")


class Interrupts:
    """An interrupt is for the cell that had been sent when it came: one that comes before the first line ends the cell
    there, one that comes after the last line does nothing.

    None is raised inside an optimizer, scheduler or scaler, which would be left half done, nor while a checkpoint is
    saved or loaded; the kernel repeats it. At most one is raised in a cell, so the user's cleanup is not interrupted.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._part = board.parts[rank]
        self._run = 0
        self._listening = False
        self._came = 0.0
        self._children: Any = signal.SIG_DFL
        """the cells' handler for SIGCHLD: torch's raises, wherever it comes, when a loader's worker dies"""
        signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._listening:
            self._came = time.monotonic()
        elif not inside_uninterruptible(frame):
            self._raise()

    def listen(self, run: int, since: float) -> None:
        """Raise interrupts from here on, and one that came after `since` (monotonic time)."""
        self._run = run
        signal.signal(signal.SIGCHLD, self._children)
        self._listening = True
        if self._came >= since:
            self._raise()

    def _raise(self) -> None:
        if self._part[RAISED] != self._run:
            self._part[RAISED] = self._run
            raise KeyboardInterrupt

    def over(self) -> None:
        """The cell has ended: no more interrupts, and the kernel need not free this rank from a collective."""
        self.ignore()
        self._part[OPEN] = -abs(self._part[OPEN])

    def ignore(self) -> None:
        if self._listening:
            self._children = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL
        self._listening = False
        signal.signal(signal.SIGINT, self._hear)  # a cell may have put a handler of its own here


def inside_uninterruptible(frame: FrameType | None) -> bool:
    """Whether this frame or a caller updates weights, or runs a step that all ranks must finish together."""
    moving = _moving()
    while frame is not None:
        if _moves(frame.f_code, moving) or frame.f_code is uninterrupted.__code__:
            return True
        frame = frame.f_back
    return False


def interrupted_a_step(trace: TracebackType | None) -> bool:
    """Whether an exception left an update of weights half done."""
    moving = _moving()
    while trace is not None:
        if _moves(trace.tb_frame.f_code, moving):
            return True
        trace = trace.tb_next
    return False


def _moves(code: CodeType, moving: frozenset[str]) -> bool:
    return code.co_filename in moving or code is changing.__code__


def _moving() -> frozenset[str]:
    """Every optimizer's `step`, also one of the user's, is wrapped by a function of the first."""
    torch: Any = sys.modules.get("torch")
    root = os.path.dirname(torch.__file__) if torch is not None else ""
    return frozenset(os.path.join(root, *path) for path in PATHS)
