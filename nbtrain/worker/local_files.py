"""Which modules are somebody's work in progress, in the kernel and on ranks; and when their files are executed.

Read by `%load_ext`, so it loads nothing but the standard library until such a file is executed.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from nbtrain.compat import python

Stamp = tuple[int, int, int]


def stamp(path: str) -> Stamp | None:
    """What differs when a file was written anew; None: it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@cache
def _elsewhere() -> tuple[str, ...]:
    """Where modules lie that are nobody's work in progress; nbtrain's own would pull the rug from under the rank."""
    paths = sysconfig.get_paths()
    found = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += [*site.getsitepackages(), site.getusersitepackages()]
    found.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return tuple({os.path.join(directory, "") for path in found for directory in (path, os.path.realpath(path))})


def local(path: str) -> bool:
    return path.endswith(".py") and not path.startswith(_elsewhere()) and "site-packages" not in path


def local_modules() -> Iterator[tuple[str, str]]:
    """Names and files of those that are loaded."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(path, str) and getattr(module, "__spec__", None) is not None and local(path):
            yield name, path


def note_executed(late: bool = True) -> None:
    """From now on it is noted what local files make when they are executed. Once for each process, and its forks.
    `late`: also of those that were executed before."""
    if not python.after_execution(_executed):
        return
    early = list(local_modules()) if late else []
    if early:
        from nbtrain.exchange.baseline import taken_late

        for name, path in early:
            taken_late(sys.modules[name], path, stamp(path))


def _executed(module: ModuleType) -> None:
    path = getattr(module, "__file__", None)
    if isinstance(path, str) and local(path):
        from nbtrain.exchange.baseline import take

        take(module, stamp(path))
