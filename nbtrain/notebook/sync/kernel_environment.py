"""Sends the ranks what changed of the kernel's directory, path, environment variables and library settings."""

from __future__ import annotations

import io
import os
import pickle
import socket
import sys
from dataclasses import fields
from typing import Any

from nbtrain.base.messages import KernelEnvironment
from nbtrain.compat import python
from nbtrain.worker.process.library_settings import Settings, read
from nbtrain.worker.process.rank_environment import torch_flags, working_directory


class SentEnvironment:
    """What the ranks of one pool were told last."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._told = KernelEnvironment()
        self._raw: Any = None
        self._port: int | None = None
        self._settings: Settings = {}
        self.notes: list[str] = []
        """sentences about settings that cannot be sent"""
        self._noted: set[str] = set()

    def changes(self, meets: bool) -> KernelEnvironment:
        """What changed since the last cell. `meets`: the cell may form a process group of its own, at a port."""
        now, told = self._now(), self._told
        self._told = now
        port = self._port
        if meets and not (port and _is_free(port)):
            self._port = _free_port()
        news = {
            field.name: value
            for field in fields(now)
            if (value := getattr(now, field.name)) != getattr(told, field.name)
        }
        port = None if self._port == port else self._port
        return KernelEnvironment(**news, port=port, settings=self._changed_settings() or None)

    def _changed_settings(self) -> dict[str, bytes]:
        now, self.notes = read(), []
        changed = {
            name: value for name, value in now.items() if name not in self._settings or self._settings[name] != value
        }
        self._settings = now
        packed = {}
        for name, value in changed.items():
            able, left = _able(value)
            packed[name] = pickle.dumps(able, 5)
            note = f"{name}: {', '.join(left)} of its settings cannot go to the ranks: set it in the %%distributed cell"
            if left and note not in self._noted:  # other filters may come and go beside the one that cannot
                self._noted.add(note)
                self.notes.append(note)
        return packed

    def _now(self) -> KernelEnvironment:
        directory = working_directory()
        # The empty entry means the working directory, which is where a notebook's own modules lie.
        path = tuple(directory if entry == "" and directory else entry for entry in sys.path)
        environ = self._told.environ
        raw = python.raw_environment()
        if raw is None or raw != self._raw:
            environ, self._raw = dict(os.environ), dict(raw or ())
        colors = self._shell.colors
        return KernelEnvironment(
            directory=directory, path=path, environ=environ, colors=colors, torch_flags=torch_flags()
        )


def _able(value: Any) -> tuple[Any, list[str]]:
    """The part of it that a rank can unpack, and the names of the rest: functions and classes of the notebook."""
    if _packs(value):
        return value, []
    if isinstance(value, dict):
        left = [str(name) for name, item in value.items() if not _packs(item)]
        return {name: item for name, item in value.items() if name not in left}, left
    if isinstance(value, list):
        able = [item for item in value if _packs(item)]
        left = [f"the filter for {item[2].__name__}" for item in value if not any(item is other for other in able)]
        return able, left  # warnings: a class of the notebook's
    return [], ["some"]


def _packs(value: Any) -> bool:
    try:
        packed = pickle.dumps(value, 5)
        if b"__main__" in packed:  # which may also be a filter's text
            _WithoutNotebook(io.BytesIO(packed)).load()
    except Exception:  # of a class of the user's
        return False
    return True


class _WithoutNotebook(pickle.Unpickler):
    """Fails on what only the notebook has."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            raise pickle.UnpicklingError(name)
        return super().find_class(module, name)


def _free_port() -> int:
    """A port that is free on all addresses of this machine, as torch's stores listen on all."""
    with socket.socket() as bound:
        bound.bind(("", 0))
        return int(bound.getsockname()[1])


def _is_free(port: int) -> bool:
    with socket.socket() as bound:
        # Closing connections of an earlier cell do not matter.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(("", port))
        except OSError:
            return False
        return True
