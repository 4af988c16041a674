"""The strategy picker as a widget: shows data, and passes the page's requests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anywidget
import traitlets

from nbtrain.views.base import BUNDLE, WIDGET, own_version

Do = Callable[[Mapping[str, Any]], None]


class Picker(anywidget.AnyWidget):
    """The picker's widget; it knows nothing of strategies."""

    _esm = BUNDLE.with_name("picker.js")
    _css = BUNDLE.with_name("picker.css")
    _model_module_version = traitlets.Unicode("*").tag(sync=True)
    _view_module_version = traitlets.Unicode("*").tag(sync=True)
    data = traitlets.Dict().tag(sync=True)

    def __init__(self, data: Mapping[str, Any], do: Do) -> None:
        super().__init__(data=dict(data), **own_version(anywidget.AnyWidget))
        self._do = do
        self.on_msg(self._hear)

    def show(self, data: Mapping[str, Any]) -> None:
        """Send the data at once, whatever the kernel is doing."""
        self.data = dict(data)

    @property
    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its mimebundle and metadata."""
        shown = {WIDGET: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}}
        found = self._repr_mimebundle_()
        return shown, dict(found[1]) if isinstance(found, tuple) else {}

    def _hear(self, widget: Any, content: Any, buffers: Any) -> None:
        if isinstance(content, dict):
            self._do(content)
