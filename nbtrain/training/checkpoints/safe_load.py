"""Reads what `torch.save` has written without running code of whoever wrote it: tensors
and plain values. What else a file holds is left out where weights are taken, and refused otherwise.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch

from nbtrain.compat import pickling
from nbtrain.errors import UsageError

DAMAGED = (
    pickle.UnpicklingError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, RecursionError,
    AssertionError, OverflowError, MemoryError,
)  # fmt: skip
"""what reading a malformed file raises"""


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
    others = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    try:
        with _allowed([(_LeftOut, name) for name in others]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:  # lists and dicts of other classes are filled as they are read
        raise refused(path, others) if others else error from None


def plain(file: IO[bytes], path: Path, weights_only: bool) -> Any:
    """What `torch.save` has written. `path`: of the checkpoint, for the message."""
    if not weights_only:
        return torch.load(file, map_location="cpu", weights_only=False)
    with _allowed(_harmless()):
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            file.seek(0)
            others = torch.serialization.get_unsafe_globals_in_checkpoint(file)
            raise refused(path, others) if others else error from None


def refused(path: Path, others: Sequence[str]) -> UsageError:
    return UsageError(
        f"{path} holds {', '.join(others)}, and reading that can run code of whoever wrote it. If you trust it: "
        "load(path, weights_only=False). Nothing was changed"
    )


@contextmanager
def _allowed(more: Sequence[Any]) -> Iterator[None]:
    """torch adds these to what the user has allowed, and takes all of them off again."""
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([one for one in more if one not in known]):
        yield


def _harmless() -> Sequence[Any]:
    """What torch does not know of, and numpy's arrays and numbers: random states, and a learning rate may be one. Paths
    and lengths of time are among the arguments of modules."""
    return [frozenset, range, slice, timedelta, type(Path()), *pickling.of_numpy()]
