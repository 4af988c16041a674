"""The dashboard and the picker as widgets. Loaded on use: anywidget takes long to import, and short cells need none."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import anywidget
import traitlets

from nbtrain.compat import kernel
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.views.base import BUNDLE, Controls, own_version, widget_bundle

KEPT = 100
"""answers that are remembered, at most"""

_resting: list[DashboardWidget] = []
"""those whose run is over"""


class FrontEndWidget(anywidget.AnyWidget):
    """A widget of nbtrain's own front end, in the version of anywidget that fits the page."""

    _model_module_version = traitlets.Unicode("*").tag(sync=True)
    _view_module_version = traitlets.Unicode("*").tag(sync=True)

    def __init__(self, **state: Any) -> None:
        super().__init__(**state, **own_version(anywidget.AnyWidget))
        self.on_msg(self._hear)

    @property
    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its mimebundle, without a text, and metadata: on Colab these say where the widget manager is."""
        mimebundle = self._repr_mimebundle_()
        return widget_bundle(self.model_id), dict(mimebundle[1]) if isinstance(mimebundle, tuple) else {}

    def _hear(self, widget: Any, content: Any, buffers: Any) -> None:
        """Called for each message of the page."""
        raise NotImplementedError


class DashboardWidget(FrontEndWidget):
    """Passes messages of the feed to the page, and commands of the page to the controls."""

    _esm = BUNDLE
    _css = BUNDLE.with_suffix(".css")
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
        super().__init__(start=feed.everything())
        kernel.answer_in_own_thread(self.comm)

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
        elif kind == "earlier":
            self._send_later(self._earlier)
        elif kind == "compare" and isinstance(run := content.get("run"), int):
            self._send_later(partial(self._compared, run))
        elif kind == "command":
            self.send(self._answer(content.get("id"), str(content.get("command"))))

    def _send_later(self, answer: Callable[[], dict[str, Any]]) -> None:
        """Files are read for it: neither the ranks nor a Stop wait for that."""
        context = contextvars.copy_context()  # kernels note there which request is answered
        send = partial(context.run, lambda: self.send(answer()))
        threading.Thread(target=send, name="nbtrain-earlier-runs", daemon=True).start()

    def _earlier(self) -> dict[str, Any]:
        return {"kind": "earlier", "runs": self._controls.earlier() if self._controls is not None else []}

    def _compared(self, run: int) -> dict[str, Any]:
        curves = self._controls.curves(run) if self._controls is not None else {}
        return {"kind": "compared", "run": run, "title": f"run {run}", "curves": curves}

    def _answer(self, number: Any, command: str) -> dict[str, Any]:
        """The answer to a command; a page that repeats it gets the same answer."""
        if number not in self._answers:
            ok, text = self._controls.do(command) if self._controls is not None else (False, "nothing can be done here")
            if len(self._answers) >= KEPT:
                self._answers.clear()
            self._answers[number] = {"kind": "ack", "id": number, "command": command, "ok": ok, "text": text}
        return self._answers[number]


class PickerWidget(FrontEndWidget):
    """Shows the picker's data, and passes the page's requests on; it knows nothing of strategies."""

    _esm = BUNDLE.with_name("picker.js")
    _css = BUNDLE.with_name("picker.css")
    data = traitlets.Dict().tag(sync=True)

    def __init__(self, data: Mapping[str, Any], do: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(data=dict(data))
        self._do = do

    def show(self, data: Mapping[str, Any]) -> None:
        """Send the data at once, whatever the kernel is doing."""
        self.data = dict(data)

    def _hear(self, widget: Any, content: Any, buffers: Any) -> None:
        if isinstance(content, dict):
            self._do(content)
