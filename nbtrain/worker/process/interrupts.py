"""What a rank does when it is told to end its cell."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import CodeType, FrameType, TracebackType
from typing import Any

from nbtrain.training.checkpoints import uninterrupted
from nbtrain.training.loop.shared_board import RAISED, Board

PATHS = ("optim", "optimizer.py"), ("optim", "lr_scheduler.py"), ("amp", "grad_scaler.py")


class Interrupts:
    """An interrupt is for the cell that had been sent when it came, however far the rank was with that cell: one that
    comes before its first line ends it at its first line, and one that comes after its last line ends nothing.

    None is raised inside an optimizer, a schedule or a scaler, which would be left half way, nor where a checkpoint is
    made or brought back; the kernel repeats it.
    And only one in a cell, however often it is repeated: what the user's code does at its end is not interrupted.
    """

    def __init__(self, board: Board, rank: int) -> None:
        self._part = board.parts[rank]
        self._run = 0
        self._listening = False
        self._came = 0.0
        self._children: Any = signal.SIG_DFL
        """what the cells have for SIGCHLD: torch's raises wherever it comes, for each loader's worker that died"""
        signal.signal(signal.SIGINT, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if not self._listening:
            self._came = time.monotonic()
        elif not held_off(frame):
            self._raise()

    def listen(self, run: int, since: float) -> None:
        """From here on an interrupt is raised; also one that came after `since`, by the clock of this machine."""
        self._run = run
        signal.signal(signal.SIGCHLD, self._children)
        self._listening = True
        if self._came >= since:
            self._raise()

    def _raise(self) -> None:
        if self._part[RAISED] != self._run:
            self._part[RAISED] = self._run
            raise KeyboardInterrupt

    def ignore(self) -> None:
        if self._listening:
            self._children = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL
        self._listening = False
        signal.signal(signal.SIGINT, self._hear)  # a cell may have put a handler of its own here


def held_off(frame: FrameType | None) -> bool:
    """Whether something that moves weights, or what belongs to them, is under way in this frame or its callers; or
    something that all ranks do, or none."""
    moving = _moving()
    while frame is not None:
        if _moves(frame.f_code, moving) or frame.f_code is uninterrupted.together.__code__:
            return True
        frame = frame.f_back
    return False


def cut_a_step_short(trace: TracebackType | None) -> bool:
    """Whether an exception came out of it."""
    moving = _moving()
    while trace is not None:
        if _moves(trace.tb_frame.f_code, moving):
            return True
        trace = trace.tb_next
    return False


def _moves(code: CodeType, moving: frozenset[str]) -> bool:
    return code.co_filename in moving or code is uninterrupted.changing.__code__


def _moving() -> frozenset[str]:
    """Every optimizer's `step`, also one of the user's, is wrapped by a function of the first."""
    torch: Any = sys.modules.get("torch")
    root = os.path.dirname(torch.__file__) if torch is not None else ""
    return frozenset(os.path.join(root, *path) for path in PATHS)
