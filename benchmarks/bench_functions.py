"""What a function on the ranks costs beside a cell, and beside accelerate's launcher; how soon a breakpoint asks."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.measure import Table, in_turns, kernel, median, seconds
from tests.support.kernels import Kernel
from tests.support.libraries import kernel_with

NBTRAIN = """
%load_ext nbtrain
import nbtrain, torch
from nbtrain import TorchDistributor, notebook_launcher
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
def cell(): pass
row = nn.Linear(10, 10).eval()
rows = DataLoader(TensorDataset(torch.randn(1_000_000, 10)), 10_000)
def first(model, batch): return model(batch[0])
"""
ACCELERATE = """
import socket
from accelerate import notebook_launcher
def cell():
    from accelerate import PartialState
    PartialState(cpu=True)
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return str(found.getsockname()[1])
"""
CELL = "%%distributed -s none -d 2 --monitor off\npass"
RUN = "nbtrain.run(cell, strategy='none', devices=2)"
LAUNCHER = "notebook_launcher(cell, num_processes=2)"
DISTRIBUTOR = "TorchDistributor(2, use_gpu=False).run(cell)"
THEIRS = "notebook_launcher(cell, num_processes=2, use_port=free_port())"
ALONE = "with torch.no_grad(): found = torch.cat([row(batch[0]) for batch in rows])"
PREDICT = "found = nbtrain.predict(row, rows, first, devices=2)"
STOPS = "%%distributed -s none -d 2 --monitor off\nbreakpoint()"


def prompt(k: Kernel) -> float:
    """Seconds from the cell's start to its first question."""
    began = time.monotonic()
    shown = k.type(STOPS, "c", timeout=30)
    return shown.prompts[0][1] - began


def main() -> None:
    table = Table("functions on 2 ranks, warm")
    with kernel(NBTRAIN) as k, kernel_with("hugging_face") as theirs:
        theirs.run(ACCELERATE, 120)
        for cell in (CELL, RUN, LAUNCHER, DISTRIBUTOR, ALONE, PREDICT):
            seconds(k, cell)
        bare, ran, launched, distributed = in_turns(21, *(partial(seconds, k, one) for one in (
            CELL, RUN, LAUNCHER, DISTRIBUTOR,
        )))  # fmt: skip
        (forked,) = in_turns(5, partial(seconds, theirs, THEIRS))
        control = f"the cell: {1e3 * bare:.1f} ms; accelerate's launcher: {forked:.1f} s"
        table.row("nbtrain.run, over a %%distributed cell", 1e3 * (ran - bare), 50.0, "ms", control)
        table.row("notebook_launcher, over it", 1e3 * (launched - bare), 50.0, "ms", control)
        table.row("TorchDistributor.run, over it", 1e3 * (distributed - bare), 50.0, "ms", control)
        one, whole = in_turns(5, partial(seconds, k, ALONE), partial(seconds, k, PREDICT))
        control = f"one process alone: {1e3 * one:.0f} ms"
        table.row("predict a million rows of 10, home, by one process's time", whole / one, 2.0, "×", control)
        prompt(k)
        table.row("a breakpoint's question, from the cell's start", median(11, partial(prompt, k)), 0.3, "s")


if __name__ == "__main__":
    main()
