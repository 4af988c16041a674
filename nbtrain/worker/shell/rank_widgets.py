"""The widgets of a rank, a progress bar for instance: what they say goes to the notebook, and so to the page.

A widget is two halves, one in Python and one on the page, which speak through a comm. On a rank a comm's messages are
events; the notebook opens a comm of the same name for each (`notebook/output/rank_widgets.py`). Nothing comes back: a
button in a cell of ranks does nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, Protocol

from nbtrain.base.events import WidgetMessage
from nbtrain.compat.intercept import Listeners

COMM = "comm.create_comm"
"""what every widget gets its comm from; made to be replaced"""


class PendingWidgets:
    """What widgets have said since the last flush. What one says of itself several times is told once."""

    def __init__(self) -> None:
        self.messages: list[WidgetMessage] = []
        self._updates: dict[str, int] = {}
        """widget → its message that later ones may be added to"""

    def add(self, message: WidgetMessage) -> None:
        if message.kind != "comm_msg" or message.data.get("method") != "update" or message.buffers:
            self._updates.clear()  # a later update may name what is opened here
        elif (at := self._updates.get(message.model)) is not None:
            before = self.messages[at]
            state = {**before.data["state"], **message.data["state"]}
            self.messages[at] = replace(before, data={**before.data, "state": state})
            return
        else:
            self._updates[message.model] = len(self.messages)
        self.messages.append(message)

    def take(self) -> list[WidgetMessage]:
        messages, self.messages = self.messages, []
        self._updates.clear()
        return messages


class Sender(Protocol):
    shows_widgets: bool

    def widget(self, message: WidgetMessage) -> None: ...


def send_widgets(outlet: Sender) -> Listeners:
    """From now on widgets that are made here give what they say to `outlet`."""
    listeners = Listeners()
    listeners.when_imported("comm", [COMM], "widgets", lambda path: lambda old: _comm_class(outlet))
    return listeners


def _comm_class(outlet: Sender) -> Any:
    from comm.base_comm import BaseComm

    class RankComm(BaseComm):
        """A comm whose other end is the notebook."""

        def publish_msg(
            self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
        ) -> None:
            if outlet.shows_widgets:
                parts = tuple(bytes(buffer) for buffer in buffers or ())
                outlet.widget(WidgetMessage(kind=msg_type, model=self.comm_id, data=_plain(data or {}), buffers=parts))

    return RankComm


def _plain(data: Any) -> Any:
    """As the page would get it. What JSON does not have raises here, in the line that has set it."""
    return json.loads(json.dumps(data, default=lambda value: value.tolist()))
