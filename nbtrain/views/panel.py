"""The dashboard's widget, in a file of its own: anywidget takes long to import, and short cells do not need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from nbtrain.compat import kernel
from nbtrain.views.base import BUNDLE, WIDGET, Controls, own_version
from nbtrain.watch.feed import Feed

KEPT = 100
"""answers that are remembered, at most"""

_resting: list[Panel] = []
"""panels whose run is over"""


class Panel(anywidget.AnyWidget):
    """Passes messages of the feed to the page, and commands of the page to the controls."""

    _esm = BUNDLE
    _css = BUNDLE.with_suffix(".css")
    _model_module_version = traitlets.Unicode("*").tag(sync=True)
    _view_module_version = traitlets.Unicode("*").tag(sync=True)
    start = traitlets.Dict().tag(sync=True)
    """what the page starts with: all that is known by then"""

    def __init__(self, feed: Feed, controls: Controls | None) -> None:
        while _resting:
            _resting.pop().close()
        self.greeted = False
        """the page has answered"""
        self._feed = feed
        self._controls = controls
        self._answers: dict[Any, dict[str, Any]] = {}
        self._unsubscribe: Callable[[], None] = feed.subscribe(self._tell)
        super().__init__(start=feed.everything(), **own_version(anywidget.AnyWidget))
        kernel.answer_in_own_thread(self.comm)
        self.on_msg(self._hear)

    @property
    def shown(self) -> dict[str, Any]:
        """Its mimebundle, without a text."""
        return {WIDGET: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}}

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the bundle: on Colab it says where the front end finds the widget manager."""
        found = self._repr_mimebundle_()
        return dict(found[1]) if isinstance(found, tuple) else {}

    def rest(self) -> None:
        """The run is over. The widget is closed only when the next one is made: a page that was reloaded during the run
        does not have the picture that replaced the widget, and still shows the widget."""
        self._unsubscribe()
        _resting.append(self)

    def close(self) -> None:
        layout = self.layout
        super().close()
        if layout is not None:
            layout.close()  # every widget has one

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Called for a page that is reloaded, which gets what is known by then."""
        state: dict[str, Any] = super().get_state(key, drop_defaults)
        if key is None and "start" in state:
            state["start"] = self._feed.everything()
        return state

    def _tell(self, message: dict[str, Any]) -> None:
        self.send(message)

    def _hear(self, widget: Any, content: Any, buffers: Any) -> None:
        """Called in the main thread or, while a cell runs, in one of ipykernel's."""
        kind = content.get("kind") if isinstance(content, dict) else None
        if kind == "hello":
            self.greeted = True
            self.send(self._feed.everything())
        elif kind == "command":
            self.send(self._answer(content.get("id"), str(content.get("command"))))

    def _answer(self, number: Any, command: str) -> dict[str, Any]:
        """The answer to a command; a page that repeats it gets the same answer."""
        if number not in self._answers:
            ok, text = self._controls.do(command) if self._controls is not None else (False, "nothing can be done here")
            if len(self._answers) >= KEPT:
                self._answers.clear()
            self._answers[number] = {"kind": "ack", "id": number, "command": command, "ok": ok, "text": text}
        return self._answers[number]
