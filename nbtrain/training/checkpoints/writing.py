"""Writes a checkpoint in a thread while the training goes on.

The ranks do not talk while they write: each puts a note into the folder when it has finished, or failed, and rank 0
waits for the notes, puts the folder together and moves it to its place. So a checkpoint needs no collective of its own
in the middle of the training's.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbtrain.errors import NbtrainError
from nbtrain.training.checkpoints import folder, full, sharded
from nbtrain.training.checkpoints.parts import Described, Part

PAUSE = 0.01


@dataclass(slots=True)
class Job:
    """What one rank does for one checkpoint."""

    place: Path
    made: Path
    """where it is written before it is moved"""
    rank: int
    parts: Sequence[Part]
    described: Mapping[str, Described]
    said: Mapping[str, Any]
    """for the marker"""
    laid: full.Layout | None = None
    """None: sharded"""
    peers: Mapping[int, int | None] = field(default_factory=dict)
    """rank → process, where it is one of this machine's"""
    keep: int | None = None
    """of the folder's checkpoints, when it was made at an interval"""

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)


class Writing:
    """One at a time: `start`, then `finish` before the next and at the end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._job: Job | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def start(self, job: Job) -> None:
        assert self._thread is None
        self._job, self._error = job, None
        self._thread = threading.Thread(target=self._run, args=(job,), name="nbtrain-checkpoint", daemon=True)
        self._thread.start()

    def finish(self, waiting: Callable[[str], None] = lambda line: None) -> NbtrainError | None:
        """Wait for it; what went wrong. `waiting` is told when that takes longer than two seconds."""
        thread, job = self._thread, self._job
        if thread is None or job is None:
            return None
        wait, began = 2.0, time.monotonic()
        while True:
            thread.join(wait)
            if not thread.is_alive():
                break
            waiting(
                f"writing checkpoint {job.place.name} ({job.nbytes / 2**20:,.0f} MB from this rank): "
                f"{time.monotonic() - began:.0f} s"
            )
            wait = 5.0
        error, self._error = self._error, None
        self._thread = self._job = None
        if error is None:
            return None
        if isinstance(error, NbtrainError):
            return error
        made = NbtrainError(f"the checkpoint {job.place} could not be written: {type(error).__name__}: {error}")
        made.__cause__ = error
        return made

    def _run(self, job: Job) -> None:
        try:
            _write(job)
        except BaseException as error:
            self._error = error


def _write(job: Job) -> None:
    try:
        if job.laid is None:
            results = sharded.write(job.made, job.rank, job.parts, job.described)
        else:
            results = []
            full.write(job.made, job.parts, job.laid, job.rank == 0)
        if job.rank:
            _note(job.made, f"written-{job.rank}", results)
            return
        every = [results, *(_wait_for(job, rank) for rank in sorted(job.peers))]
        if job.laid is None:
            sharded.conclude(job.made, every, job.described)
        for rank in job.peers:
            _path(job.made, f"written-{rank}").unlink()
        folder.mark(job.made, job.said)
        folder.move(job.made, job.place)
    except BaseException as error:
        if job.rank:
            if not job.made.exists():  # rank 0 has given it up, and says why
                return
            with contextlib.suppress(OSError):
                _note(job.made, f"failed-{job.rank}", f"{type(error).__name__}: {error}")
        else:
            folder.remove(job.made)
        raise
    if job.keep is not None:
        folder.prune(job.place.parent, job.keep)


def _wait_for(job: Job, rank: int) -> Any:
    """What this rank says that it has written."""
    written, failed = _path(job.made, f"written-{rank}"), _path(job.made, f"failed-{rank}")
    process = job.peers[rank]
    while True:
        gone = process is not None and not folder.alive(process)  # asked first: it may write in between
        if written.exists():
            return pickle.loads(written.read_bytes())
        if failed.exists():
            raise NbtrainError(
                f"the checkpoint {job.place} could not be written: rank {rank}: {pickle.loads(failed.read_bytes())}"
            )
        if gone:
            raise NbtrainError(f"the checkpoint {job.place} was given up: rank {rank} ended before it had written")
        time.sleep(PAUSE)


def _note(made: Path, name: str, content: Any) -> None:
    path = _path(made, name)
    with open(path.with_suffix(".tmp"), "wb") as out:
        pickle.dump(content, out)
    os.replace(path.with_suffix(".tmp"), path)


def _path(made: Path, name: str) -> Path:
    return made / f".{name}"
