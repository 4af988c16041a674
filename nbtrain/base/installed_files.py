"""Tells installed files, which nobody edits between two cells, from local ones.

The kernel and its ranks use it alike. It loads nothing but the standard library, because `%load_ext` uses it.
"""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from contextlib import suppress
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))
_PATHS = sysconfig.get_paths()
"""Read before executed files are noted, because Python executes a file for it."""
_path: list[str] | None = None
_places: tuple[str, ...] = ()


def is_installed(file: str) -> bool:
    """Whether a file that Python executed is an installed one."""
    global _path, _places
    if _path != sys.path:
        _path = list(sys.path)
        _places = _find()
    return file.startswith(_places) or "site-packages" in file


def installed_versions() -> dict[str, str]:
    """Plain name of each installed package → its version. Where there are two, the one that comes first on the path."""
    versions: dict[str, str] = {}
    for folder in sys.path:
        for name, version in versions_in(folder).items():
            versions.setdefault(plain_name(name), version.partition("+")[0])
    return versions


def versions_in(folder: str) -> dict[str, str]:
    """Packages whose metadata are in this folder, by the names of what holds these."""
    versions = {}
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".dist-info", ".egg-info")):
                name, _, version = entry.name.rpartition(".")[0].partition("-")
                versions[name] = version.partition("-py3")[0]
    return versions


def plain_name(package: str) -> str:
    """Equal for all ways to spell it: `Scikit_Learn`, `scikit-learn`."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _find() -> tuple[str, ...]:
    """All folders where this Python finds packages: its own, its venv's, the user's, those of pip's `--target` and of
    `.pth` files. Also nbtrain's, which must not be reloaded on a rank, and torch's, which is too large to compare."""
    folders = {_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(_HERE)}
    folders |= {path for path in sys.path if _holds_packages(path)}
    spec = PathFinder.find_spec("torch")
    folders |= set(spec.submodule_search_locations or ()) if spec else set()
    return "<frozen", *{
        os.path.join(written, "") for path in folders if path for written in (path, os.path.realpath(path))
    }


def _holds_packages(folder: str) -> bool:
    """Whether pip installs into this folder. Never true of the notebook's own: people write their modules there."""
    if os.path.basename(folder) in ("site-packages", "dist-packages"):
        return True
    try:
        if not os.path.isabs(folder) or folder == os.getcwd():
            return False
        with os.scandir(folder) as entries:
            return any(entry.name.endswith(".dist-info") for entry in entries)
    except OSError:
        return False
