"""The dashboard as its user has it: in JupyterLab, while a cell blocks the kernel, and in the saved notebook."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.lab import Notebook, Server

WIDGET = "application/vnd.jupyter.widget-view+json"

SETUP = """%load_ext nbtrain
import torch, time
weight = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(weight.weight)
optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
loader = torch.utils.data.DataLoader(torch.ones(100_000, 1), batch_size=4)"""

LOOP = """
for step, x in enumerate(loader):
    loss = -weight(x).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    log(loss=loss)
    time.sleep(0.02)
    if step == {last}: break"""

STEP = "[...document.querySelectorAll('.nbt-table tbody td.nbt-step')].map(cell => +cell.textContent.replace(',', ''))"
DRAWN = "[...document.querySelectorAll('.nbt-board canvas')].filter(canvas => canvas.width > 0).length"
IMAGE = "document.querySelector('.jp-OutputArea-output img[alt=charts]')?.naturalWidth"


@pytest.mark.thorough
@pytest.mark.lab
def test_a_run_is_watched_stopped_and_saved(notebook: Callable[..., Notebook], lab: Server, browser: Any) -> None:
    page = notebook(SETUP, "%%distributed -d 2 -s ddp" + LOOP.format(last=None), "print(weight.weight.item())")
    page.run(0)
    page.start(1)
    page.page.wait_for_function(f"{STEP}.length === 2 && {DRAWN} > 0")
    before = page.page.evaluate(STEP)
    page.page.wait_for_function(f"{STEP}.every((step, rank) => step > {before}[rank] + 10)")
    assert [output["data"].keys() for output in page.outputs(1) if "data" in output] == [{WIDGET, "text/plain"}]

    page.page.locator(".nbt-buttons button", has_text="Stop").click()
    page.wait(1)
    outputs = page.outputs(1)
    (said,) = (output["evalue"] for output in outputs if output["output_type"] == "error")
    steps = re.fullmatch(r"stopped after step (\d+); what the cell did until then is in the notebook", said)
    assert page.run(2)[0]["text"] == f"{float(steps[1])}\n"
    assert [output["data"].keys() for output in outputs if "data" in output] == [{"text/html", "text/plain"}]
    page.page.wait_for_function(f"{IMAGE} > 0")

    # Saved, changed by somebody else, and opened without the kernel that ran it: not trusted, so only what every page
    # lets through is left.
    page.page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    (path,) = lab.root.glob("test_a_run_is_watched*.ipynb")
    book = nbformat.read(path, as_version=4)
    book.cells[1].outputs[-1]["evalue"] += " "
    nbformat.write(book, lab.root / "changed.ipynb")
    again = Notebook(browser, lab, "changed.ipynb")
    try:
        again.page.wait_for_function(f"{IMAGE} > 0")
        table = again.page.locator(".jp-OutputArea-output table").inner_text()
        assert re.search(rf"1\s+stopped\s+{steps[1]}", table)
    finally:
        again.close()
    assert page.external == again.external == []
    assert not [said for said in (*page.console, *again.console) if said[0] == "pageerror"]


@pytest.mark.thorough
@pytest.mark.lab
def test_an_earlier_run_is_compared_while_the_cell_blocks_the_kernel(
    notebook: Callable[..., Notebook], tmp_path: Path
) -> None:
    page = notebook(
        f"%env NBTRAIN_HISTORY={tmp_path}\n{SETUP}",
        "%%distributed -d 2 -s ddp" + LOOP.format(last=9),
        "%%distributed -d 2 -s ddp" + LOOP.format(last=None),
    )
    page.run(0)
    page.run(1)
    page.start(2)
    page.page.wait_for_function(f"{STEP}.length === 2 && {DRAWN} > 0")
    select = page.page.get_by_label("compare with")
    select.wait_for()
    number = select.locator("option").nth(1).get_attribute("value")
    select.select_option(number)
    page.page.locator(".nbt-plot").first.scroll_into_view_if_needed()
    page.page.locator(".nbt-chart-value", has_text=f"run {number}").wait_for()
    # Keys in a chart are the chart's: JupyterLab's would leave the cell, or split it.
    cells = page.page.locator(".jp-Cell").count()
    page.page.locator(".nbt-plot").first.focus()
    for key in ("End", "ArrowLeft", "+", "Escape", "Enter"):
        page.page.keyboard.press(key)
    page.page.get_by_role("dialog", name="loss").wait_for()
    page.page.keyboard.press("Escape")
    page.page.get_by_role("dialog", name="loss").wait_for(state="detached")
    assert page.page.locator(".jp-Cell").count() == cells
    page.page.locator(".nbt-buttons button", has_text="Stop").click()
    page.wait(2)
    assert not [said for said in page.console if said[0] == "pageerror"]
