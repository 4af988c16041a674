"""What a rank says when a cell fails: which error, where, and how far it had come."""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from types import FunctionType, TracebackType
from typing import Any

from nbtrain.base.errors import RAISED_BY, CannotTravel, NbtrainError
from nbtrain.base.events import Failed
from nbtrain.compat import strategy_packages
from nbtrain.exchange.parcel import Parcel
from nbtrain.worker.home.rank_side import RankSide
from nbtrain.worker.process.interrupts import interrupted_a_step
from nbtrain.worker.shell.shell import RankShell


class FailureReport:
    """Turns an error into text, and into an exception that the notebook can raise again."""

    def __init__(self, rank: int, shell: RankShell, twins: RankSide) -> None:
        self._rank = rank
        self._shell = shell
        self._twins = twins

    def told(self, error: BaseException, lines: list[str], interrupted: bool) -> Failed:
        return Failed(
            rank=self._rank, time=time.time(), name=type(error).__name__, text=_text(error), lines=tuple(lines),
            exception=None if interrupted else self._packed(error), interrupted=interrupted,
            relayed=getattr(error, RAISED_BY, self._rank) != self._rank,
            frames=_frames(error.__traceback__) if interrupted else (),
        )  # fmt: skip

    def lines_of(self, error: BaseException) -> list[str]:
        strategy_packages.explain(error)
        if isinstance(error, NbtrainError):
            return [f"{type(error).__name__}: {error}"]
        made = self._shell.InteractiveTB.structured_traceback(type(error), error, _in_cells(error.__traceback__))
        return list(made)

    def _packed(self, error: BaseException) -> bytes | None:
        """The exception itself, so that the notebook can raise one of the same type."""
        cls = type(error)
        # Pickle would call an `__init__` of the user's once more, with what it had given to its base.
        plain = isinstance(cls.__init__, FunctionType) and cls.__reduce__ is BaseException.__reduce__
        try:
            whole = (cls, error.args, vars(error)) if plain else error
            parcel: Parcel | None = self._twins.alone("exception", whole)
        except (CannotTravel, Exception):  # its class may do anything when it is pickled
            return None
        return None if parcel is None else pickle.dumps(parcel, 5)


def where_it_stood(failed: Failed, error: BaseException, runtime: Any, *, pieces: bool, grouped: bool) -> Failed:
    """Adds how far the run had come when its code raised."""
    steps = runtime.steps
    return replace(
        failed, steps=steps.count, calls=steps.calls, entered=runtime.collective_guard.count,
        between=_is_stop(error), pieces=pieces, grouped=grouped,
        # A closure's first backward is between two steps too, though an optimizer has called it.
        whole=(_is_stop(error) or not interrupted_a_step(error.__traceback__)) and not _cut(runtime),
    )  # fmt: skip


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


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # its class is the user's
        return "<its __str__ raises>"


def _cut(runtime: Any) -> bool:
    return runtime.card_steps is not None and runtime.card_steps.cut


def _is_stop(error: BaseException) -> bool:
    """Whether it was raised where no step was under way."""
    from nbtrain.worker.loop.stopping import Stopped
    from nbtrain.worker.ranks.card_steps import GivenUp

    return isinstance(error, Stopped | GivenUp)


def _frames(trace: TracebackType | None) -> tuple[tuple[str, int, str], ...]:
    found = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return tuple(found[::-1])
