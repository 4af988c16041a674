"""What the dashboard says in JupyterLab when its kernel is restarted, dies, or is out of the page's reach."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests.support.lab import Notebook

pytestmark = [pytest.mark.thorough, pytest.mark.lab, pytest.mark.limit(180)]

SETUP = """%load_ext nbtrain
import os, time, torch
weight = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(weight.parameters(), lr=0.01)
print(os.getpid())"""
TRAIN = """%%distributed -d 2 -s ddp
while True:
    loss = weight(torch.ones(4, 1)).mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    log(loss=loss)
    time.sleep(0.02)"""
BACKGROUND = TRAIN.replace("-s ddp", "-s ddp --background")
KERNEL = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
IDLE = f"{KERNEL}.status === 'idle' && {KERNEL}.connectionStatus === 'connected'"


def training(notebook: Callable[..., Notebook], *more: str) -> tuple[Notebook, int]:
    """A run that is watched, and the kernel's process."""
    book = notebook(SETUP, TRAIN, *more)
    return book, watched(book)


def watched(book: Notebook) -> int:
    """Starts its run; the kernel's process."""
    pid = int(book.run(0)[0]["text"])
    # What the server knew of the ranks is evidence later on: it is asked when a run is first heard of.
    with book.page.expect_response(lambda response: "nbtrain/api/pools" in response.url, timeout=30_000):
        book.start(1)
    book.page.locator(".nbt-root canvas").first.wait_for()
    assert book.page.locator(".nbt-run-state").inner_text() == "▸ running"
    return pid


def over(book: Notebook, words: str) -> None:
    """The dashboard says so, has no buttons, and its clock stands."""
    page = book.page
    page.locator(".nbt-why", has_text=words).wait_for(timeout=30_000)
    assert page.locator(".nbt-buttons:visible").count() == 0
    assert "running" not in page.locator(".nbt-head").inner_text()
    clock = page.locator(".nbt-figures").inner_text()
    page.wait_for_timeout(2500)
    assert page.locator(".nbt-figures").inner_text() == clock


def test_a_kernel_that_was_restarted(notebook: Callable[..., Notebook]) -> None:
    book, pid = training(notebook, SETUP, BACKGROUND, "nbtrain.background().stop()")
    page = book.page
    os.kill(pid, signal.SIGSTOP)  # else it may still say that the run was stopped: a restart begins with an interrupt
    page.evaluate(f"{KERNEL}.restart()")
    over(book, "The kernel was restarted; this run is over.")

    # The kernel has the same id, and trains again: what is left of the old dashboard must not reach it.
    page.wait_for_function(IDLE)
    assert int(book.run(2)[0]["text"]) != pid
    book.run(3)
    page.locator(".nbt-root").nth(1).locator("canvas").first.wait_for()
    steps = "document.querySelectorAll('.nbt-root')[1].querySelector('td.nbt-step').textContent"
    page.evaluate("[...document.querySelectorAll('.nbt-root')[0].querySelectorAll('button')][0].click()")
    page.wait_for_timeout(3000)
    before = page.evaluate(steps)
    page.wait_for_function(f"{steps} !== {before!r}")
    assert page.locator(".nbt-run-state").all_inner_texts() == ["⚠ kernel restarted", "▸ running"]


def test_a_kernel_that_died(notebook: Callable[..., Notebook]) -> None:
    book, pid = training(notebook)
    os.kill(pid, signal.SIGKILL)
    over(book, "this run is over.")


def test_a_kernel_out_of_reach(notebook: Callable[..., Notebook]) -> None:
    """The page hears no more of it. The server does: what it says is shown, and Stop goes through it."""
    book, pid = training(notebook)
    page = book.page
    page.evaluate(f"() => {{ const kernel = {KERNEL}; kernel._reconnectLimit = 0; kernel._ws.close(); }}")
    page.get_by_text("no news for").wait_for()
    steps = "document.querySelector('td.nbt-step').textContent"
    for _ in range(2):
        before = page.evaluate(steps)
        page.wait_for_function(f"{steps} !== {before!r}")
    page.get_by_role("button", name="Stop In [2]").click()
    page.locator(".nbt-run-state", has_text="stopped").wait_for()
    os.kill(pid, 0)  # the kernel lives


def test_a_kernel_out_of_reach_that_ends(notebook: Callable[..., Notebook]) -> None:
    book, pid = training(notebook)
    book.page.evaluate(f"() => {{ const kernel = {KERNEL}; kernel._reconnectLimit = 0; kernel._ws.close(); }}")
    os.kill(pid, signal.SIGKILL)
    over(book, "this run is over.")


def test_a_kernel_whose_ranks_the_server_does_not_see(notebook: Callable[..., Notebook]) -> None:
    """As behind a gateway. Stop interrupts it, and the run is not said to be over before it is."""
    book = notebook(SETUP, TRAIN)
    page = book.page
    page.route("**/nbtrain/api/pools", lambda route: route.fulfill(json=[]))
    page.route("**/nbtrain/api/pools/*/*", lambda route: route.fulfill(status=404, json={}))
    pid = watched(book)
    page.get_by_role("button", name="Stop In [2]").click()
    page.locator("b", has_text="stopped").wait_for()  # the picture that takes the dashboard's place
    os.kill(pid, 0)  # the kernel lives
