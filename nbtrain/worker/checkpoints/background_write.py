"""Writes a checkpoint in a thread while the training goes on.

The ranks do not talk while they write: each puts a note into the folder when it has finished, or failed, and rank 0
waits for the notes, puts the folder together and moves it to its place. So a checkpoint needs no collective of its own
in the middle of the training's.

For each rank that still has to write there is a file, `.owed-N`, from before the rank can fail. One that gives up
removes it, which works on a full disk, too. Rank 0 stops waiting for a rank whose file is gone, whose process is gone,
that has left the cell without having begun, or, if it runs on another machine, whose folder does not change for long.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbtrain.base.errors import NbtrainError
from nbtrain.worker.checkpoints import folder, tensor_files
from nbtrain.worker.checkpoints.content import RankPart

PAUSE = 0.01
LOOK = 0.1
"""Seconds between looks for what ranks of other machines have written: the folder is far away."""
GRACE = 10.0
"""Seconds after the cell's end until every machine sees that a rank has begun to write."""
SILENCE = 900.0
"""Seconds without a change to the folder after which rank 0 stops waiting for a rank of another machine."""


class NotWritten(NbtrainError):
    """A checkpoint that could not be written. `at_interval`: the cell has not asked for it itself."""

    at_interval = False


@dataclass(slots=True)
class WriteJob:
    """What one rank writes for one checkpoint."""

    place: Path
    made: Path
    """where it is written before it is moved"""
    rank: int
    parts: Sequence[RankPart]
    said: Mapping[str, Any]
    """for the marker"""
    laid: tensor_files.FileLayout | None = None
    """None: sharded"""
    peers: Mapping[int, int | None] = field(default_factory=dict)
    """rank → process, where it is one of this machine's"""
    keep: int | None = None
    """how many checkpoints stay in the folder, if it was made at an interval"""
    cell_over: threading.Event = field(default_factory=threading.Event)
    """no rank is on its way to writing any more"""

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)


class BackgroundWrite:
    """Writes one checkpoint at a time in a thread: `start`, then `finish` before the next and at the end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._job: WriteJob | None = None
        self._error: BaseException | None = None

    @property
    def left_behind(self) -> bool:
        """Whether a checkpoint of an earlier cell is being written."""
        return self._job is not None and self._job.cell_over.is_set()

    def leave_behind(self) -> None:
        """Another cell begins, and all ranks have left the one before."""
        if self._job is not None:
            self._job.cell_over.set()

    def start(self, job: WriteJob) -> None:
        assert self._thread is None
        self._job, self._error = job, None
        self._thread = threading.Thread(target=self._run, args=(job,), name="nbtrain-checkpoint", daemon=True)
        self._thread.start()

    def finish(self, waiting: Callable[[str], None] = lambda line: None) -> NotWritten | None:
        """Wait for it, and return its error. `waiting` is told when that takes longer than two seconds."""
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
        said = f"the checkpoint {job.place} could not be written: {type(error).__name__}: {error}"
        made = NotWritten(str(error) if isinstance(error, NbtrainError) else said)
        made.__cause__, made.at_interval = error, job.keep is not None
        return made

    def _run(self, job: WriteJob) -> None:
        try:
            _write(job)
        except BaseException as error:  # raised at the next write
            self._error = error
        finally:
            job.parts = ()  # as large as what is trained; the next cell may be long in coming


def _write(job: WriteJob) -> None:
    try:
        if job.rank:
            os.truncate(_path(job.made, f"owed-{job.rank}"), 1)  # it has begun
        with folder.telling_of_a_full_disk(str(job.place)):
            if job.laid is None:
                tensor_files.write_parts(job.made, job.rank, job.parts)
            else:
                tensor_files.write(job.made, job.parts, job.laid, job.rank == 0)
        if job.rank:
            _path(job.made, f"written-{job.rank}").touch()
            return
        for rank in sorted(job.peers):
            _wait_for(job, rank)
            _path(job.made, f"written-{rank}").unlink()
            _path(job.made, f"owed-{rank}").unlink()
        folder.mark(job.made, job.said)
        folder.move(job.made, job.place)
    except BaseException as error:
        if job.rank and not job.made.exists():  # rank 0 has given it up, and says why
            return
        give_up(job.made, job.rank, error)
        raise
    if job.keep is not None:
        folder.prune(job.place.parent, job.keep, job.said["trains"])


def owe(made: Path, ranks: Iterable[int]) -> None:
    """Note that these ranks still have to write."""
    for rank in ranks:
        _path(made, f"owed-{rank}").touch()


def give_up(made: Path, rank: int, error: BaseException) -> None:
    """Say that this rank writes nothing, so that nobody waits for it."""
    if rank == 0:
        folder.remove(made)
        return
    with contextlib.suppress(OSError):
        _note(made, f"failed-{rank}", f"{type(error).__name__}: {error}")
    with contextlib.suppress(OSError):
        _path(made, f"owed-{rank}").unlink()


def _wait_for(job: WriteJob, rank: int) -> None:
    """Wait until this rank has written."""
    written, failed, owed = (_path(job.made, f"{what}-{rank}") for what in ("written", "failed", "owed"))
    process = job.peers[rank]
    began = moved = time.monotonic()
    seen: Any = None
    while True:
        now = time.monotonic()
        if not job.cell_over.is_set() or _has_begun(owed):
            began = now
        if process is not None or (files := _seen(job.made)) != seen:
            moved, seen = now, None if process is not None else files
        gone = process is not None and not folder.alive(process)  # asked first: it may write in between
        given_up = not owed.exists()
        if written.exists():
            return
        if failed.exists():
            raise NbtrainError(f"the checkpoint {job.place} could not be written: rank {rank}: {failed.read_text()}")
        if gone or given_up or now - began > GRACE:
            raise NbtrainError(f"the checkpoint {job.place} was abandoned: rank {rank} ended before it had written")
        if now - moved > SILENCE:
            raise NbtrainError(
                f"the checkpoint {job.place} was abandoned: rank {rank} has written nothing for {SILENCE:.0f} s"
            )
        time.sleep(PAUSE if process is not None else LOOK)


def _has_begun(owed: Path) -> bool:
    try:
        return owed.stat().st_size > 0
    except OSError:
        return False


def _seen(made: Path) -> Any:
    """What is in the folder, to see whether anything was written since."""
    try:
        with os.scandir(made) as entries:
            return {(entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in entries}
    except OSError:  # one is renamed
        return None


def _note(made: Path, name: str, content: str) -> None:
    path = _path(made, name)
    path.with_suffix(".tmp").write_text(content)
    os.replace(path.with_suffix(".tmp"), path)


def _path(made: Path, name: str) -> Path:
    return made / f".{name}"
