"""A file of the user's is there whole, or as it was: what is written stands beside it until all of it is. One that is
there already is replaced only where the user says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nbtrain.base.errors import UsageError


def refuse_existing(files: Iterable[Path], force: bool) -> None:
    for file in files:
        if file.exists() and not force:
            raise UsageError(f"{file} is there already: another name, or --force")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """The name to write under; it takes the place of `path` at the end, unless something was raised."""
    path = os.path.realpath(path)  # of a link, what it leads to
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        yield beside
        if os.path.exists(path):
            shutil.copymode(path, beside)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise
