"""Tells the user which modules the kernel runs in an older version than the disk has; ranks may run the newer one."""

from __future__ import annotations

import os
import sys
from typing import Any

from nbtrain.compat import kernel
from nbtrain.exchange.local_files import Stamp, local_modules, stamp
from nbtrain.worker.modules.installed_packages import Change, InstalledPackages


class StaleModules:
    """Which of the kernel's modules are older than their files. It compares after each cell: on a rank imports
    are intercepted, in the kernel they are not."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.packages = InstalledPackages()
        self._loaded: frozenset[str] = frozenset()
        self._files: dict[str, tuple[str, Any, Stamp | None]] = {}
        """local module → file, its spec (a new one after a reload), and the file's stamp then"""
        self._said: dict[str, Stamp | None] = {}
        self._changes: list[Change] = []
        self.look()

    def look(self) -> None:
        """Note, after a cell, what was imported or reloaded."""
        self._changes += self.packages.look(lambda module, path: module not in self._loaded)
        for name, (_, spec, _) in list(self._files.items()):
            module = sys.modules.get(name)
            if getattr(module, "__spec__", None) is not spec:
                del self._files[name]
                self._note(name, getattr(module, "__file__", None), module)
        if len(sys.modules) != len(self._loaded):
            self._loaded = frozenset(sys.modules)
            for name, path in local_modules():
                if name not in self._files:
                    self._note(name, path, sys.modules.get(name))

    def _note(self, name: str, path: str | None, module: Any) -> None:
        if path is not None:
            self._files[name] = path, getattr(module, "__spec__", None), stamp(path)

    def _autoreloaded(self, name: str, path: str) -> bool:
        """Whether `%autoreload` has brought the module up to date in place."""
        reloader = kernel.autoreloader(self._shell)
        if reloader is None or not os.path.exists(path):
            return False
        mtime = os.stat(path).st_mtime
        return bool(reloader.modules_mtimes.get(name) == mtime and reloader.failed.get(path) != mtime)

    def lines(self, forks: bool) -> list[str]:
        """What to say, each thing once, before a cell is sent to the ranks."""
        self.look()
        said = []
        old = []
        for name, (path, _, seen) in self._files.items():
            now = stamp(path)
            if now is not None and now != seen and self._said.get(name) != now and not self._autoreloaded(name, path):
                self._said[name] = now
                old.append(name)
        if old:
            whose = "it too: they are copies of the notebook" if forks else "what is on the disk now"
            again = f"importlib.reload({old[0]})" if len(old) == 1 else "importlib.reload(...) of each"
            said.append(
                f"{', '.join(old)}: changed on disk since the notebook imported {'it' if len(old) == 1 else 'them'}. "
                f"The notebook runs the old text until {again} or %autoreload 2; the ranks run {whose}"
            )
        changes, self._changes = self._changes, []
        said += [change.sentence("this notebook still runs", "restart the kernel") for change in changes]
        return said
