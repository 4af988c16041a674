"""Finds local modules, which users edit, in the kernel and on ranks, and notes when their files are executed.

`%load_ext` uses it, so it loads nothing but the standard library until such a file is executed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType

from nbtrain.base.installed_files import is_installed
from nbtrain.compat import python

Stamp = tuple[int, int, int]


def stamp(path: str) -> Stamp | None:
    """A value that changes when the file is written again; None: there is no such file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def local(path: str) -> bool:
    return path.endswith(".py") and not is_installed(path)


def local_modules() -> Iterator[tuple[str, str]]:
    """Names and files of the local modules that are loaded."""
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(path, str) and getattr(module, "__spec__", None) is not None and local(path):
            yield name, path


def note_executed(late: bool = True) -> None:
    """From now on note what local files define when they are executed. Once per process, also for its forks. `late`:
    also for files that were executed before."""
    if not python.after_execution(_executed):
        return
    early = list(local_modules()) if late else []
    if early:
        from nbtrain.exchange.python_module_baseline import taken_late

        for name, path in early:
            taken_late(sys.modules[name], path, stamp(path))


_waiting: list[tuple[ModuleType, Stamp | None]] = []
_taking = False


def _executed(module: ModuleType) -> None:
    """Note one module. That imports torch and more, so this may be called inside of itself or from another thread: then
    the call that is running does it."""
    global _taking
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not local(path):
        return
    _waiting.append((module, stamp(path)))
    if _taking:
        return
    _taking = True
    try:
        from nbtrain.exchange.python_module_baseline import take

        while _waiting:
            take(*_waiting.pop(0))
    finally:
        _taking = False
