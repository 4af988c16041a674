"""Reads what `torch.save` has written without running code of whoever wrote it: tensors and plain values. A file that
holds anything else is refused.
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

from nbtrain.base.errors import UsageError
from nbtrain.compat import pickling, python

DAMAGED = (
    pickle.UnpicklingError, RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, RecursionError,
    AssertionError, OverflowError,
)  # fmt: skip
"""what reading a malformed file raises"""
READS_ALL = "load(path, weights_only=False)"


def plain(file: IO[bytes], path: Path, weights_only: bool) -> Any:
    """What `torch.save` has written. `path`: of the checkpoint, for the message. `weights_only`: as `torch.load`'s."""
    if not weights_only:
        return torch.load(file, map_location="cpu", weights_only=False)
    with _allowed(_harmless()):
        if others := sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)):
            raise refused(path, others)
        file.seek(0)
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # classes of numpy's are without a name in there
            others = re.findall(r"but got <class '([\w.]+)'>", str(error))
            raise refused(path, others) if others else error from None


def refused(path: Path, others: Sequence[str]) -> UsageError:
    return UsageError(
        f"{path} holds {', '.join(others)}, and reading that can run code of whoever wrote it. If you trust it: "
        f"{READS_ALL}. Nothing was changed"
    )


@contextmanager
def _allowed(more: Sequence[Any]) -> Iterator[None]:
    """torch adds these to what the user has allowed, and takes all of them off again."""
    known = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([cls for cls in more if cls not in known]):
        yield


def _harmless() -> Sequence[Any]:
    """What torch does not know of, and numpy's arrays and numbers: random states, and a learning rate may be one."""
    times = [datetime.timedelta, datetime.datetime, datetime.date, datetime.time, datetime.timezone]
    paths: list[Any] = [(Path, f"{module}.PosixPath") for module in python.MODULES_OF_PATHS]
    paths += [(PureWindowsPath, f"{module}.WindowsPath") for module in python.MODULES_OF_PATHS]
    return [frozenset, range, slice, *times, *paths, *pickling.of_numpy()]
