"""Reads what `torch.save` has written without running code of whoever wrote it: tensors
and plain values. What else a file holds is left out, and refused where it would be taken.
"""

from __future__ import annotations

import datetime
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from typing import IO, Any

import torch

from nbtrain.compat import pickling, python
from nbtrain.errors import UsageError

DAMAGED = (
    pickle.UnpicklingError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, RecursionError,
    AssertionError, OverflowError,
)  # fmt: skip
"""what reading a malformed file raises"""
GOES_ON = ("random", "loops", "scale")
"""of what a checkpoint is about: taken where a training goes on"""
READS_ALL = "load(path, weights_only=False)"


class _LeftOut:
    """Stands for an object of a class that is no tensor and no plain value."""

    def __new__(cls, *args: Any, **options: Any) -> _LeftOut:
        return object.__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def weights(path: Path, weights_only: bool) -> Any:
    """What `torch.save` has written to this file, on the disk still. Objects of other classes are left out.
    `weights_only`: as `torch.load`'s."""
    if not weights_only:
        return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    return _without_others(path, path, mmap=True)


def plain(file: IO[bytes], path: Path, weights_only: bool) -> Any:
    """What `torch.save` has written. `path`: of the checkpoint, for the message."""
    if not weights_only:
        return torch.load(file, map_location="cpu", weights_only=False)
    with _allowed(_harmless()):
        return _without_others(file, path)


def _without_others(file: Any, path: Path, **how: Any) -> Any:
    others = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    if file is not path:
        file.seek(0)
    try:
        with _allowed([(type(name, (_LeftOut,), {}), name) for name in others]):
            return torch.load(file, map_location="cpu", weights_only=True, **how)
    except pickle.UnpicklingError as error:  # lists and dicts of other classes are filled as they are read
        others = others or re.findall(r"but got <class '([\w.]+)'>", str(error))  # of numpy's: without a name in there
        raise refused(path, others) if others else error from None


def check_taken(path: Path, taken: Any, later: Sequence[str] = ()) -> None:
    """Raise if an object in there was left out. `later`: what is below these names is looked at where it is taken."""
    if others := sorted(set(_left_out(taken, later))):
        raise refused(path, others)


def _left_out(value: Any, later: Sequence[str]) -> Iterator[str]:
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, _LeftOut):
        yield kind.__name__
    elif isinstance(value, dict):
        yield from _left_out([*value, *(part for name, part in value.items() if name not in later)], later)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from _left_out(part, later)


def refused(path: Path, others: Sequence[str]) -> UsageError:
    return UsageError(
        f"{path} holds {', '.join(others)}, and reading that can run code of whoever wrote it. If you trust it: "
        f"{READS_ALL}. Nothing was changed"
    )


@contextmanager
def naming(line: str) -> Iterator[None]:
    """Where `load` is not what the user has called: a refusal names this line."""
    try:
        yield
    except UsageError as error:
        if READS_ALL not in str(error):
            raise
        raise UsageError(str(error).replace(READS_ALL, line)) from None


@contextmanager
def _allowed(more: Sequence[Any]) -> Iterator[None]:
    """torch adds these to what the user has allowed, and takes all of them off again."""
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([one for one in more if one not in known]):
        yield


def _harmless() -> Sequence[Any]:
    """What torch does not know of, and numpy's arrays and numbers: random states, and a learning rate may be one."""
    times = [datetime.timedelta, datetime.datetime, datetime.date, datetime.time, datetime.timezone]
    paths: list[Any] = [(Path, f"{module}.PosixPath") for module in python.MODULES_OF_PATHS]
    paths += [(PureWindowsPath, f"{module}.WindowsPath") for module in python.MODULES_OF_PATHS]
    return [frozenset, range, slice, *times, *paths, *pickling.of_numpy()]
