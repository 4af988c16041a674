"""Widgets of ranks in the notebook: each has a mirror here, through which it speaks to the page.

The mirrors outlive their cell, and their ranks: as in a notebook of one process, a page that is loaded again shows what
widgets have said last.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbtrain.base.events import WidgetMessage
from nbtrain.compat import widgets
from nbtrain.watch.views.base import WIDGET


class RankWidgets:
    """The widgets of all ranks that have shown some."""

    def __init__(self) -> None:
        self._mirrors: dict[str, Any] = {}
        self.moved: dict[str, None] = {}
        """those that have said something in the present run"""

    def take(self, messages: Iterable[WidgetMessage]) -> None:
        """Pass on what they say."""
        if not widgets.in_notebook():  # a terminal
            return
        for message in messages:
            with self._only_this_one(message.model):
                self._take(message)

    def shown(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a rank displays, without the view of a widget that it opened when nothing of it was shown."""
        view = data.get(WIDGET)
        known = view is None or view.get("model_id") in self._mirrors
        return data if known else {kind: value for kind, value in data.items() if kind != WIDGET}

    def end(self, ok: bool) -> None:
        """A run is over. `ok`: it was not cut short; else bars that will move no more are shown as failed."""
        moved, self.moved = self.moved, {}
        for model in moved if not ok else ():
            with self._only_this_one(model):
                mirror = self._mirrors.get(model)
                if mirror is not None and _unfinished(mirror.state):
                    mirror.pass_on({"method": "update", "state": {"bar_style": "danger"}, "buffer_paths": []}, ())

    @contextmanager
    def _only_this_one(self, model: str) -> Iterator[None]:
        """A package that does not fit must not end a training."""
        try:
            yield
        except Exception as error:  # whatever a package raises, which is said
            self._mirrors.pop(model, None)
            warnings.warn(f"a widget of a rank is not shown: {error!r}", RuntimeWarning, stacklevel=2)

    def _take(self, message: WidgetMessage) -> None:
        data, model = message.data, message.model
        if message.kind == "comm_open":
            if "state" in data:
                made = widgets.mirror(model, data["state"], data.get("buffer_paths", ()), message.buffers)
                self._mirrors[model] = made
        elif model not in self._mirrors:
            return
        elif message.kind == "comm_close":
            self._mirrors.pop(model).close()
        else:
            self._mirrors[model].pass_on(data, message.buffers)
        self.moved[model] = None


def _unfinished(state: dict[str, Any]) -> bool:
    """Whether this is a progress bar that is not at its end. `info` is one without an end."""
    style, value, most = state.get("bar_style"), state.get("value"), state.get("max")
    moves = isinstance(value, int | float) and isinstance(most, int | float) and value < most
    return style == "info" or (style == "" and moves)
