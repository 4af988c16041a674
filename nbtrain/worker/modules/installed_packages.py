"""Installed packages: which of those that this process runs are installed in another version by now, or not at all.

A look is one `stat` for each folder of the path; only where something was put in or taken out is it read again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nbtrain.base.installed_files import versions_in

Installed = dict[str, tuple[str, str]]
"""name of a package → version, folder"""


@dataclass(frozen=True, slots=True)
class Change:
    name: str
    loaded: str
    installed: str | None
    """None: removed"""

    def sentence(self, who: str, remedy: str) -> str:
        now = "was removed" if self.installed is None else f"{self.installed} is installed"
        return f"{self.name} {now}, and {who} {self.loaded}: {remedy}"


class InstalledPackages:
    """Reports packages whose installed version changed since this object was made."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[int, dict[str, str]]] = {}
        self._known: Installed = {}
        self._stale: dict[str, str] = {}
        """package → loaded version, where another one is installed"""
        self.moved = False
        """whether any package was installed, removed or replaced"""
        self._read()
        self._known = self._merged()

    def look(self, fresh: Callable[[str, str], bool]) -> list[Change]:
        """Changes to report now. `fresh(module, file)`: whether the loaded module is the file as it is now."""
        if not self._read():
            return []
        before, now = self._known, self._merged()
        self._known = now
        changes = []
        differing = [name for name in before if before[name] != now.get(name)]
        self.moved = self.moved or bool(differing)
        for name in differing:
            version = now[name][0] if name in now else None
            loaded = self._stale.pop(name, before[name][0])
            if loaded == version:
                continue
            folder = before[name][1]
            if version is not None:
                running = _running(name, version, now[name][1], fresh) or _vanished(name, folder)
            else:
                running = _vanished(name, folder)
            if running:
                self._stale[name] = loaded
                changes.append(Change(name, loaded, version))
        return changes

    def _read(self) -> bool:
        """Whether any folder changed."""
        news = False
        for folder in sys.path:
            try:
                at = os.stat(folder).st_mtime_ns
            except OSError:
                at = 0
            seen = self._folders.get(folder)
            if seen is not None and (seen[0] == at or not (seen[1] or folder.endswith("-packages"))):
                continue
            self._folders[folder] = at, versions_in(folder)
            if seen is None:  # new on the path: nothing of it was loaded before
                for name, version in self._folders[folder][1].items():
                    self._known.setdefault(name, (version, folder))
            else:
                news = True
        return news

    def _merged(self) -> Installed:
        """Where two versions are installed, the one that comes first on the path."""
        merged: Installed = {}
        for folder in sys.path:
            for name, version in self._folders.get(folder, (0, {}))[1].items():
                merged.setdefault(name, (version, folder))
        return merged


def _running(name: str, version: str, folder: str, fresh: Callable[[str, str], bool]) -> bool:
    """Whether a module of this package is loaded that is not what the package now has."""
    for module, path in _modules(name, version, folder):
        imported = sys.modules.get(module)
        if imported is not None and getattr(imported, "__version__", None) != version and not fresh(module, path):
            return True
    return False


def _modules(name: str, version: str, folder: str) -> Iterator[tuple[str, str]]:
    try:
        with open(os.path.join(folder, f"{name}-{version}.dist-info", "RECORD"), encoding="utf-8") as record:
            lines = [line.partition(",")[0] for line in record]
    except OSError:
        lines = [f"{name}/__init__.py", f"{name}.py"]
    for line in lines:
        stem, dot, rest = line.partition(".")
        if dot and rest.endswith(("py", "so", "pyd")) and not line.startswith("__editable__"):
            module = stem.replace("/", ".").removesuffix(".__init__")
            yield module, os.path.join(folder, line)


def _vanished(name: str, folder: str) -> bool:
    """Whether something that is loaded lay in this folder under this package's name and is not there any more."""
    inside = os.path.join(folder, "")
    for module, imported in list(sys.modules.items()):
        path: Any = getattr(imported, "__file__", None)
        if module.partition(".")[0].lower() == name.lower() and isinstance(path, str) and path.startswith(inside):
            return not os.path.exists(path)
    return False
