"""A detached run in JupyterLab: its kernel is shut down; another notebook attaches, watches, stops it, has its work."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbtrain.annexes.detached import keeper_client
from nbtrain.annexes.detached.run_folders import every_run
from tests.support.lab import Notebook

WIDGET = "application/vnd.jupyter.widget-view+json"
SETUP = """%env NBTRAIN_RUNS={runs}
%load_ext nbtrain
import torch, time
weight = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(weight.weight)
optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
loader = torch.utils.data.DataLoader(torch.ones(100_000, 1), batch_size=4)"""
RUN = """%%distributed -d 2 -s ddp --detach
for step, x in enumerate(loader):
    loss = -weight(x).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    log(loss=loss)
    if step % 50 == 0 and rank == 0: print('batch', step)
    time.sleep(0.02)"""
STEP = "[...document.querySelectorAll('.nbt-table tbody td.nbt-step')].map(cell => +cell.textContent.replace(',', ''))"
DRAWN = "[...document.querySelectorAll('.nbt-board canvas')].filter(canvas => canvas.width > 0).length"
IMAGE = "document.querySelector('.jp-OutputArea-output img[alt=charts]')?.naturalWidth"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NBTRAIN_RUNS", str(tmp_path / "runs"))
    yield tmp_path / "runs"
    for run in every_run():
        keeper_client.ask(run, "kill")


@pytest.mark.thorough
@pytest.mark.lab
def test_another_notebook_watches_and_stops_it(notebook: Callable[..., Notebook], runs: Path) -> None:
    first = notebook(SETUP.format(runs=runs), RUN)
    first.run(0)
    first.run(1)
    first.page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    page = notebook(SETUP.format(runs=runs), "%distributed attach", "print(weight.weight.item())")
    page.run(0)
    page.page.wait_for_timeout(20_000)
    page.start(1)
    page.page.wait_for_function(f"{STEP}.length === 2 && {DRAWN} > 0")
    before = page.page.evaluate(STEP)
    assert min(before) > 300  # its whole history
    page.page.wait_for_function(f"{STEP}.every((step, rank) => step > {before}[rank] + 50)")
    assert [output["data"].keys() for output in page.outputs(1) if "data" in output] == [{WIDGET, "text/plain"}]
    page.page.locator(".nbt-buttons button", has_text="Stop").click()
    page.wait(1)
    outputs = page.outputs(1)
    said = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    steps = re.search(r"was stopped after step ([\d,]+)", said)
    assert steps is not None
    assert page.run(2)[0]["text"] == f"{float(steps[1].replace(',', ''))}\n"
    assert [output["data"].keys() for output in outputs if "data" in output] == [{"text/html", "text/plain"}]
    page.page.wait_for_function(f"{IMAGE} > 0")
    assert not [said for said in page.console if said[0] == "pageerror"]
