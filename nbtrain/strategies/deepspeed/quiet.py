"""Keeps what DeepSpeed prints and logs out of the user's cell, and lets through what nbtrain says."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from typing import Any

_outs: list[Any] = []
"""where prints went before each `quiet`"""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Its warnings and errors are shown."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    _outs.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        _outs.pop()
        logging.disable(before)


def say(text: str) -> None:
    """Also inside of `quiet`."""
    print(text, file=_outs[0] if _outs else sys.stdout, flush=True)
