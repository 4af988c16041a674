"""Runs a script that was written for `torchrun` on the ranks."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

_scripts = 0
"""that run in this process, one within another"""


def in_a_script() -> bool:
    """Whether this rank runs a script: what a script calls in each process is called so here, too."""
    return _scripts > 0


def run_script(path: str, arguments: list[str]) -> None:
    """On a rank: `if __name__ == "__main__"` holds, `sys.argv` and the imports of its folder are as from a terminal."""
    global _scripts
    before = sys.argv[:], sys.path[:]
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    _scripts += 1
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        _end(path, end.code)
    finally:
        _scripts -= 1
        sys.argv[:], sys.path[:] = before


def _end(path: str, code: Any) -> None:
    """`sys.exit()` of a script that is done is no error."""
    if code not in (None, 0):
        raise RuntimeError(f"{path} ended with {code!r}") from None
