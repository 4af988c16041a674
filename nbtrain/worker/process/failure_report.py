"""What a rank says when a cell fails: which error, where, and how far it had come."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from types import FunctionType, TracebackType
from typing import Any

from nbtrain.base.errors import RAISED_BY, CannotTravel, NbtrainError, text_of
from nbtrain.base.events import Failed
from nbtrain.compat import strategy_packages
from nbtrain.exchange.parcel import Parcel
from nbtrain.worker.loop.shared_board import ABORT, RAISED
from nbtrain.worker.process.interrupts import interrupted_a_step

LOOKS = 2.0
"""Seconds for which a failed rank waits to hear from its GPU whether it can be used."""


class FailureReport:
    """Turns an error into text, and into an exception that the notebook can raise again."""

    def __init__(self, rank: Any) -> None:
        """`rank`: the one of worker/rank.py."""
        self._rank = rank
        self.gave_up = 0
        """the run whose collectives this rank has given up"""

    def fail(self, error: BaseException, lines: list[str] | None = None, number: int = 0) -> None:
        """Say that the cell has failed, or the rank. `number`: the run whose code raised."""
        rank, here = self._rank, self._rank.info.rank
        interrupted = self._is_interruption(error)
        lines = self.lines_of(error) if lines is None else lines  # first: it may put the error into other words
        failed = Failed(
            rank=here, time=time.time(), name=type(error).__name__, text=text_of(error), lines=tuple(lines),
            exception=None if interrupted else self._packed(error), interrupted=interrupted,
            relayed=getattr(error, RAISED_BY, here) != here,
            frames=_frames(error.__traceback__) if interrupted else (),
        )  # fmt: skip
        if number:
            steps, card, between = rank.runtime.now.steps, rank.runtime.now.card_steps, _is_stop(error)
            failed = replace(
                failed, steps=steps.count, calls=steps.calls, entered=rank.runtime.now.collective_guard.count,
                between=between, pieces=bool(rank.twins.pieces), grouped=rank.group.intact,
                # A closure's first backward is between two steps too, though an optimizer has called it.
                whole=(between or not interrupted_a_step(error.__traceback__)) and not (card is not None and card.cut),
            )  # fmt: skip
            if rank.cells.trial is None:
                rank.debugging.keep(error, number)
        # Of several it has been waited for: `CellRuns._settle`.
        if rank.info.device.startswith("cuda") and card_is_lost(LOOKS if rank.info.world_size == 1 else 0.0):
            failed = replace(failed, card_lost=True, whole=False)
        rank.send_last(failed)
        rank.shell.clear_last_error()

    def worth_showing(self, error: BaseException | None) -> bool:
        """The cell's code has ended. Whether the shell shows what it raised."""
        rank = self._rank
        rank.interrupts.over()
        if rank.cells.trial is not None and rank.cells.trial.well(error):
            return False
        if error is not None and rank.runtime.now is not None:
            rank.runtime.now.explain(error)
        strategy_packages.explain(error)
        return not self._is_interruption(error)

    def _is_interruption(self, error: BaseException | None) -> bool:
        """Whether the kernel caused this error: an interrupt, or a collective that failed once peers were given up."""
        rank, last = self._rank, self._rank.cells.last
        if last is None:
            return False
        number = last[0].number
        if isinstance(error, KeyboardInterrupt):  # the cell may raise one of its own
            return bool(rank.board.parts[rank.info.rank][RAISED] == number)
        # Another rank may have shut its end before this one's meters have looked. Under NCCL the group is gone then,
        # which torch calls a wrong value.
        of_group = isinstance(error, ValueError) and "process group" in text_of(error).lower()
        return (of_group or isinstance(error, RuntimeError)) and number in (self.gave_up, rank.board.head[ABORT])

    def lines_of(self, error: BaseException) -> list[str]:
        strategy_packages.explain(error)
        if isinstance(error, NbtrainError):
            return [f"{type(error).__name__}: {error}"]
        made = self._rank.shell.InteractiveTB.structured_traceback(type(error), error, _in_cells(error.__traceback__))
        return list(made)

    def _packed(self, error: BaseException) -> bytes | None:
        """The exception itself, so that the notebook can raise one of the same type."""
        cls = type(error)
        # Pickle would call an `__init__` of the user's once more, with what it had given to its base.
        plain = isinstance(cls.__init__, FunctionType) and cls.__reduce__ is BaseException.__reduce__
        try:
            whole = (cls, error.args, vars(error)) if plain else error
            parcel: Parcel | None = self._rank.twins.alone("exception", whole)
        except (CannotTravel, Exception):  # its class may do anything when it is pickled
            return None
        return None if parcel is None else pickle.dumps(parcel, 5)


def card_is_lost(seconds: float) -> bool:
    """Whether CUDA lets this process compute no more, as after an index out of bounds on the card. It is asked without
    waiting for what others have to do for it: for so many seconds at most."""
    import torch

    late = time.monotonic() + seconds
    try:
        while not torch.cuda.current_stream().query() and time.monotonic() < late:
            time.sleep(0.001)
    except RuntimeError:
        return True
    return False


def _in_cells(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the notebook's first line on; all of it if there is none."""
    at = trace
    while at is not None and at.tb_frame.f_globals.get("__name__") != "__main__":
        at = at.tb_next
    return at or trace


def _is_stop(error: BaseException) -> bool:
    """Whether it was raised where no step was under way."""
    from nbtrain.worker.loop.stopping import Stopped
    from nbtrain.worker.ranks.finished_gpu_steps import GivenUp

    return isinstance(error, Stopped | GivenUp)


def _frames(trace: TracebackType | None) -> tuple[tuple[str, int, str], ...]:
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return tuple(frames[::-1])
