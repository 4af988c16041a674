"""While a cell blocks the kernel, what a page asks that is loaded again is answered, and all else keeps its order."""

from __future__ import annotations

import time

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.thorough]

WIDGETS = """
import ipywidgets
order, pressed = [], []
button = ipywidgets.Button()
button.on_click(lambda _: pressed.append(len(order)))
"""
BLOCKS = "%%distributed -d 2 --monitor off\nimport time; print('here'); time.sleep(2); order.append('the cell')"


def replies(kernel: Kernel, *asked: str) -> dict[str, tuple[float, dict[str, object]]]:
    """When each was answered, and how."""
    began, found = time.monotonic(), {}
    while not {*asked} <= {*found}:
        reply = kernel.client.get_shell_msg(timeout=30)
        found[reply["parent_header"].get("msg_id")] = (time.monotonic() - began, reply)
    return found


def send(kernel: Kernel, kind: str, content: dict[str, object], **metadata: str) -> str:
    message = kernel.client.session.msg(kind, content, metadata=metadata)
    kernel.client.shell_channel.send(message)
    return message["header"]["msg_id"]


def test_widgets_are_told_of_and_queued_cells_wait(kernel: Kernel) -> None:
    nb = Notebook(kernel)
    nb(WIDGETS)
    running = kernel.start(BLOCKS)
    kernel.wait_for(lambda: "here" in running.stdout)
    comm = "a-page-that-was-loaded-again"
    first, second = (kernel.start(f"order.append({number})") for number in (1, 2))
    info = send(kernel, "comm_info_request", {"target_name": "jupyter.widget"})
    hello = send(kernel, "kernel_info_request", {})
    send(kernel, "comm_open", {"comm_id": comm, "target_name": "jupyter.widget.control", "data": {}}, version="1.0.0")
    send(kernel, "comm_msg", {"comm_id": comm, "data": {"method": "request_states"}})
    send(kernel, "comm_open", {"comm_id": "theirs", "target_name": "somebody's", "data": {}})
    found = replies(kernel, info, hello)
    assert not running.done, "answered while the cell runs"
    comms = found[info][1]["content"]["comms"]  # type: ignore[index]
    assert len(comms) >= 3, "the button, its layout and style"
    states = None
    until = time.monotonic() + 10
    while states is None and time.monotonic() < until:
        message = kernel.client.get_iopub_msg(timeout=10)
        kernel._dispatch(message)
        data = message["content"].get("data", {})
        if message["msg_type"] == "comm_msg" and data.get("method") == "update_states":
            states = data["states"]
    assert states is not None
    assert any(state["model_name"] == "ButtonModel" for state in states.values())
    assert not running.done
    model = next(key for key, state in states.items() if state["model_name"] == "ButtonModel")
    send(kernel, "comm_msg", {"comm_id": model, "data": {"method": "custom", "content": {"event": "click"}}})
    kernel.wait(second)
    assert first.done
    assert running.done
    assert nb("print(order)").stdout == "['the cell', 1, 2]\n", "a queued cell runs when its turn comes"
    assert nb("print(pressed)").stdout == "[3]\n", "and so does a callback of the user's"
