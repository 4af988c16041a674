"""Which files are installed, so that nobody edits them between two cells; all others are somebody's work in progress.

One answer for the kernel and its ranks. It loads nothing but the standard library: `%load_ext` asks.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from importlib.machinery import PathFinder

_PATHS = sysconfig.get_paths()
"""Asked for before anybody listens to what is executed: Python executes a file for that."""
_path: list[str] | None = None
_places: tuple[str, ...] = ()


def is_installed(file: str) -> bool:
    """Of a file that Python executed, by the name that it goes by."""
    global _path, _places
    if _path != sys.path:
        _path = list(sys.path)
        _places = _find()
    return file.startswith(_places) or "site-packages" in file


def _find() -> tuple[str, ...]:
    """Wherever this Python finds packages: below it, in its venv, in the user's own folder; where pip's `--target` put
    them or a `.pth` names them. nbtrain's own folder would pull the rug from under the rank, and torch's own is too
    large to be looked at, wherever they are."""
    found = {_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.path.abspath(__file__))}
    found |= {path for path in sys.path if _holds_packages(path)}
    spec = PathFinder.find_spec("torch")
    found |= set(spec.submodule_search_locations or ()) if spec else set()
    return "<frozen", *{os.path.join(one, "") for path in found if path for one in (path, os.path.realpath(path))}


def _holds_packages(folder: str) -> bool:
    """The notebook's own folder is never one: people write their modules there."""
    if os.path.basename(folder) in ("site-packages", "dist-packages"):
        return True
    try:
        if not os.path.isabs(folder) or folder == os.getcwd():
            return False
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(".dist-info") for entry in entries)
    except OSError:
        return False
