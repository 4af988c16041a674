"""Where the ranks are: the line of the notebook, and what they wait for."""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from nbtrain.base.events import RankLocals
from nbtrain.base.humanize import ranks as ranks_in_words
from nbtrain.engines.base import Frame, Pool
from nbtrain.worker.loop.shared_board import OPEN

OURS = f"{Path(__file__).resolve().parents[2]}{os.sep}"
TORCH = f"{os.sep}torch{os.sep}"
"""Frames in torch's own wrappers say nothing to the user."""
LONG = 100
"""Characters of a line that are shown."""


def where(pool: Pool, ranks: Iterable[int], run: int, numbers: Mapping[str, int]) -> list[str]:
    """A line for all ranks that are at the same place. `numbers`: file names of cells → their numbers."""
    ranks = sorted(ranks)
    stacks, alive, pids = pool.stacks(ranks), pool.alive(), pool.pids()
    by_frame: dict[str, list[int]] = {}
    for rank in ranks:
        if rank not in alive:
            doing = "has no process"
        elif rank in pids and _stopped(pids[rank]):
            doing = f"is stopped by a signal; kill -CONT {pids[rank]} lets it go on"
        elif rank not in stacks:
            doing = "is starting"
        elif pool.board.parts[rank][OPEN] == -run:
            doing = "has come to the end of the cell"
        elif pool.board.parts[rank][OPEN] != run:
            doing = "waits for a cell"
        else:
            waits = pool.board.waits(rank, run)
            doing = _doing(stacks[rank], numbers, waits[1] if waits is not None else "")
        by_frame.setdefault(doing, []).append(rank)
    return [
        f"{ranks_in_words(ranks_there)} {_plural(doing, len(ranks_there))}" for doing, ranks_there in by_frame.items()
    ]


def locals_lines(rank: int, told: RankLocals | None, numbers: Mapping[str, int]) -> list[str]:
    """What a rank's calls hold, a line for each local. `told` None: it has not answered."""
    if told is None:
        return [f"rank {rank} has not answered: it computes in code that lets no other thread run, or has no process"]
    lines = [f"rank {rank}:" if told.frames else f"rank {rank}: not in code of the notebook's"]
    for frame in told.frames:
        number = numbers.get(frame.filename)
        at = os.path.basename(frame.filename) if number is None else f"Cell In[{number}]"
        called = "" if frame.function == "<module>" else f", in {frame.function}"
        lines.append(f"  {at}, line {frame.line}{called}")
        lines += [f"      {name} = {value}" for name, value in frame.values]
        lines += [f"      and {frame.more} more"] if frame.more else []
    return lines


def _doing(frames: list[Frame], numbers: Mapping[str, int], waits: str) -> str:
    at = place(frames, numbers)
    if waits:
        return f"waits {waits}, {at}"
    return f"is {at}" if at else "is somewhere that Python does not know"


def place(frames: list[Frame], numbers: Mapping[str, int]) -> str:
    """`at Cell In[4], line 9, in load: batch = next(it)`, and what was called there. `frames`: innermost first."""
    cell = next((frame for frame in frames if frame.filename in numbers or _of_a_cell(frame.filename)), None)
    theirs = (frame for frame in frames if not frame.filename.startswith(OURS) and TORCH not in frame.filename)
    inner = next(theirs, None)
    called = f"in {inner.function} ({os.path.basename(inner.filename)}:{inner.line})" if inner is not None else ""
    if cell is None:
        return called
    number = numbers.get(cell.filename)
    at = f"at Cell In[{number}], line {cell.line}" if number is not None else f"at line {cell.line} of a cell"
    if cell.function != "<module>":
        at += f", in {cell.function}"
    text = linecache.getline(cell.filename, cell.line).strip()[:LONG]
    at += f": {text}" if text else ""
    return at if inner == cell else f"{called}, called {at}"


def _of_a_cell(filename: str) -> bool:
    return "ipykernel_" in filename or filename.startswith("<ipython-input-")


def _stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _plural(doing: str, count: int) -> str:
    verb, _, rest = doing.partition(" ")
    return f"{ {'is': 'are', 'waits': 'wait', 'has': 'have'}[verb] if count > 1 else verb } {rest}"
