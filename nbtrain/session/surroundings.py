"""Directory, path, environment and torch's settings of the kernel, for the ranks: what changed since the last cell."""

from __future__ import annotations

import os
import sys
from typing import Any

from nbtrain.compat import python
from nbtrain.messages import Surroundings
from nbtrain.worker.surroundings import torch_flags


class Mirror:
    """What the ranks of one pool were told last."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._told = Surroundings()
        self._raw: Any = None

    def changes(self) -> Surroundings:
        now, told = self._now(), self._told
        self._told = now
        return Surroundings(
            directory=None if now.directory == told.directory else now.directory,
            path=None if now.path == told.path else now.path,
            environ=None if now.environ == told.environ else now.environ,
            colors=None if now.colors == told.colors else now.colors,
            torch_flags=None if now.torch_flags == told.torch_flags else now.torch_flags,
        )

    def _now(self) -> Surroundings:
        try:
            directory = os.getcwd()
        except FileNotFoundError:  # it was deleted under the notebook
            directory = None
        # The empty entry means the working directory, which is where a notebook's own modules lie.
        path = tuple(directory if entry == "" and directory else entry for entry in sys.path)
        environ = self._told.environ
        raw = python.raw_environment()
        if raw is None or raw != self._raw:
            environ, self._raw = dict(os.environ), dict(raw or ())
        colors = self._shell.colors
        return Surroundings(directory=directory, path=path, environ=environ, colors=colors, torch_flags=torch_flags())
