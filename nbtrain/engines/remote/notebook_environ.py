"""Which environment variables go to ranks on other machines: those that the notebook has set. What it was started with
(PATH, HOME, cards, the queue's) is this machine's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache


def set_in_notebook() -> dict[str, str]:
    before = _at_start()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


@cache
def _at_start() -> dict[str, str]:
    try:
        with open("/proc/self/environ", "rb") as file:
            pairs = (entry.partition(b"=") for entry in file.read().split(b"\0") if entry)
            return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    except OSError:  # not on Linux: as it was at the first look
        return dict(os.environ)


def lies_in(path: str, folders: Sequence[str]) -> bool:
    """Whether it is one of these folders or in one: of a Python's, where each machine has its own installation."""
    real = os.path.realpath(path)
    return any(real == folder or real.startswith(folder + os.sep) for folder in folders)
