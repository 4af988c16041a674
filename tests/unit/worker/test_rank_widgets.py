"""What a rank's widgets say is told in few messages, in an order that a page understands."""

from __future__ import annotations

import os

import numpy as np
import pytest

from nbtrain.base.events import Event, RankState, WidgetMessage, Widgets
from nbtrain.worker.shell.output import Outlet
from nbtrain.worker.shell.rank_widgets import PendingWidgets, _comm_class


def opened(model: str) -> WidgetMessage:
    return WidgetMessage(kind="comm_open", model=model, data={"state": {"value": 0}})


def update(model: str, **state: object) -> WidgetMessage:
    return WidgetMessage(kind="comm_msg", model=model, data={"method": "update", "state": state, "buffer_paths": []})


def test_updates_of_a_widget_become_one() -> None:
    pending = PendingWidgets()
    for value in range(1000):
        pending.add(update("bar", value=value))
        pending.add(update("text", value=str(value)))
    pending.add(update("bar", bar_style="success"))
    assert pending.take() == [update("bar", value=999, bar_style="success"), update("text", value="999")]
    assert pending.take() == []


def test_an_update_stays_behind_what_it_may_name() -> None:
    pending = PendingWidgets()
    custom = WidgetMessage(kind="comm_msg", model="box", data={"method": "custom", "content": {}})
    said = [update("box", children=[]), opened("child"), update("box", children=["child"]), custom]
    said += [update("box", children=[]), WidgetMessage(kind="comm_close", model="child", data={})]
    for message in said:
        pending.add(message)
    assert pending.take() == said


def outlet(events: list[Event], shows: bool = True) -> Outlet:
    made = Outlet(0, events.append)
    made.begin(RankState(rank=0, time=0.0, state="running"), shows_widgets=shows)
    return made


def test_a_widget_comes_before_what_shows_it() -> None:
    events = list[Event]()
    there = outlet(events)
    comm = _comm_class(there)(target_name="jupyter.widget", data={"state": {"value": np.int64(3)}})
    there.show({"text/plain": "bar"})
    comm.close()
    there.flush()
    assert [type(event).__name__ for event in events] == ["RankState", "Widgets", "Display", "Widgets"]
    (first,) = next(event for event in events if isinstance(event, Widgets)).messages
    assert (first.kind, first.model, first.data) == ("comm_open", comm.comm_id, {"state": {"value": 3}})


def test_what_json_does_not_have_raises_where_it_is_set() -> None:
    comm = _comm_class(outlet([]))(target_name="jupyter.widget")
    with pytest.raises(AttributeError, match="tolist"):
        comm.send({"state": {"value": object()}})


def test_of_a_rank_that_nobody_sees_nothing_is_sent() -> None:
    events = list[Event]()
    there = outlet(events, shows=False)
    comm = _comm_class(there)(target_name="jupyter.widget")
    comm.send({"method": "update", "state": {"value": object()}})
    there.flush()
    assert events == []


def test_a_loaders_worker_sends_none() -> None:
    """It is a fork of the rank, in which nobody would ever send what is collected."""
    sent: list[Event] = []
    there = outlet(sent)
    there.widget(update("bar", value=1))
    read, write = os.pipe()
    if os.fork() == 0:
        there.flush()
        os.write(write, str((there.shows_widgets, len(sent))).encode())
        os._exit(0)
    os.wait()
    assert os.read(read, 20) == b"(False, 0)"
    assert there.shows_widgets
    os.close(read)
    os.close(write)
