"""What a stage's code raises, every rank raises: a cell that catches it goes on alike on all of them.

A forward tells of it with what goes to every rank anyway. A backward tells the stages before; the ones behind go on
meanwhile, and hear of it where all ranks meet next, so that it costs nothing where nothing fails.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch.distributed as dist

from nbtrain.errors import RAISED_BY, NotSupported

UNSENDABLE = (
    "rank {rank} raised {name}: {text}. Under pipeline all ranks raise what the stage of one did, and this one cannot "
    "be sent to them ({why}): raise one that pickle can copy, a ValueError say, or use --strategy ddp"
)


@dataclass(frozen=True, slots=True)
class StageFailure:
    """Goes to other ranks in the place of what a stage was to make."""

    rank: int
    said: bytes
    """the error"""


class StageErrors:
    """One rank's part in it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.found: StageFailure | None = None
        """that some rank has failed, and not all know yet"""
        self._error: Exception | None = None
        """this rank's own"""

    def take(self, error: Exception) -> StageFailure:
        """This rank's code raised it."""
        if self.found is None:
            said = _packed(error)
            if isinstance(said, str):
                text = UNSENDABLE.format(rank=self.rank, name=type(error).__name__, text=error, why=said)
                self._error = NotSupported(text)
                self._error.__cause__ = error
                said = pickle.dumps(self._error)
            else:
                self._error = error
            self.found = StageFailure(self.rank, said)
        return self.found

    def know(self, value: Any) -> None:
        """If that is what came."""
        if isinstance(value, StageFailure) and self.found is None:
            self.found = value

    def forget(self) -> None:
        self.found = self._error = None

    def agree(self) -> None:
        """Some rank has failed: all raise. Collective."""
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, self.found)
        self.fail(next(one for one in everybody if one is not None))

    def fail(self, failure: StageFailure) -> NoReturn:
        """All ranks are here, with the same one."""
        error = self._error
        self.forget()
        if failure.rank != self.rank or error is None:
            error = _opened(failure.said)
        with suppress(AttributeError):  # a class with slots
            setattr(error, RAISED_BY, failure.rank)
        raise error


def is_everywhere(error: BaseException) -> bool:
    """Every rank raises it."""
    return hasattr(error, RAISED_BY)


def _packed(error: Exception) -> bytes | str:
    """Why not, where it cannot be."""
    cls = type(error)
    # Pickle would call an `__init__` of the user's once more, with what it had given to its base.
    own = isinstance(cls.__init__, FunctionType) and cls.__reduce__ is BaseException.__reduce__
    try:
        said = pickle.dumps((cls, error.args, vars(error)) if own else error)
        _opened(said)
    except Exception as why:  # its class may do anything
        return str(why) or type(why).__name__
    return said


def _opened(said: bytes) -> Exception:
    found = pickle.loads(said)
    if isinstance(found, tuple):
        cls, args, attributes = found
        found = cls.__new__(cls, *args)
        vars(found).update(attributes)
    if not isinstance(found, Exception):
        raise TypeError(f"it comes back as {type(found).__name__}")
    return found
