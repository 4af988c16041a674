"""Checkpoints in a notebook, and Stop while one is written or loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.kernels import Kernel

IN_A_NOTEBOOK = """
%load_ext nbtrain
import os, time, torch, nbtrain
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
def make():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = make()
loader = DataLoader(data, 4, shuffle=True)
def epoch():
    for x, y in loader:
        F.mse_loss(model(x), y).backward()
        optimizer.step(); optimizer.zero_grad()
def steps(optimizer):
    return sorted({int(held['step']) for held in optimizer.state.values()})
"""


def test_in_a_notebook(shared_kernel: Kernel) -> None:
    """One after another, as somebody would: at intervals, by hand, elsewhere, by name, after a change of strategy."""
    run = shared_kernel.run
    run(IN_A_NOTEBOOK)
    shown = run("%%distributed --devices 2 --save-every 3 --keep-last 2\nepoch()\nsave('best')")
    assert shown.error is None, shown.text
    told = run("print(sorted(os.listdir('checkpoints')), steps(optimizer))")
    assert told.stdout == "['step-000003', 'step-000006'] [8]\n"
    run("before = [p.detach().clone() for p in model.parameters()]; model, optimizer = make()")
    shown = run("%%distributed --devices 2 --strategy fsdp\nload('best', model, optimizer)")  # not IPython's %load
    assert shown.error is None, shown.text
    told = run("print(all(torch.equal(a, b) for a, b in zip(before, model.parameters())), steps(optimizer))")
    assert told.stdout == "True [8]\n"
    shown = run("%%distributed --devices 2 --strategy fsdp --save-every 5\nepoch()\nsave('full', full=True)")
    assert shown.error is None, shown.text
    told = run(
        "from safetensors.torch import load_file\nd = load_file('full/model.safetensors')\n"
        "print(all(torch.equal(d[n], v) for n, v in model.state_dict().items()), steps(optimizer))\n"
        "print(sorted(os.listdir('checkpoints')))"
    )
    assert told.stdout == "True [16]\n['step-000006', 'step-000010', 'step-000015']\n"
    run("other = nn.Linear(2, 2)")
    shown = run("%%distributed --devices 2\nload('best', other)")
    assert "is of another model: other.weight (2, 2) is not there" in shown.text
    shown = run("%%distributed --devices 2 --save-every 3\nprint('trains'); other(torch.ones(1, 2))")
    assert "has checkpoints of another training" in shown.text
    assert "trains" not in shown.stdout
    shown = run("%%distributed --devices 2 --save-every 3 --save-to others\nother(torch.ones(1, 2))")
    assert shown.error is None, shown.text
    shown = run("%%rank 0 --devices 2\nsave('best', model)")
    assert "needs all ranks" in shown.text
    shown = run("%%distributed --devices 2 --save-every 10x\nepoch()")
    assert "takes a number of steps" in shown.text
    assert not [name for name in os.listdir(shared_kernel.home) if name.endswith(".tmp")]
    run("%distributed stop")


def test_stop_leaves_whole_checkpoints(shared_kernel: Kernel) -> None:
    run = shared_kernel.run
    run(IN_A_NOTEBOOK)
    result = shared_kernel.start(
        "%%distributed --devices 2 --save-every 1 --save-to stopped --keep-last 2\n"
        "print('running')\nwhile True:\n    epoch()"
    )
    shared_kernel.wait_for(lambda: "running" in result.stdout)
    folder = Path(shared_kernel.home) / "stopped"
    # The third or a later one: they come and go faster than one looks.
    shared_kernel.wait_for(lambda: any(one.name >= "step-000003" for one in folder.glob("step-*")))
    shared_kernel.interrupt()
    shared_kernel.wait(result)
    told = run(
        "taken = steps(optimizer)[0]; other, adam = make(); nbtrain.load('stopped', model=other, optimizer=adam)\n"
        "print(taken - steps(adam)[0] in (0, 1))"
    )
    assert told.stdout == "True\n", told.text
    shown = run("%%distributed --devices 2\nepoch()\nsave('stopped/after')")
    assert shown.error is None, shown.text
    assert not [name for name in os.listdir(Path(shared_kernel.home) / "stopped") if name.startswith(".")]
    run("%distributed stop")


RESTORES = """
%load_ext nbtrain
import os, time, torch, nbtrain
from torch import nn
class Slow(nn.Linear):
    def get_extra_state(self):
        return 1
    def set_extra_state(self, state):
        open('inside', 'w').close()
        time.sleep(1.5)
first, second = Slow(300, 300), nn.Linear(300, 300)
def fill(number):
    for p in [*first.parameters(), *second.parameters()]:
        p.data.fill_(number)
def held():
    return sorted({number for m in (first, second) for p in m.parameters() for number in p.flatten().tolist()})
fill(2); nbtrain.save('two', first=first, second=second); fill(1)
"""


@pytest.mark.thorough
def test_stop_does_not_cut_a_load_in_two(shared_kernel: Kernel) -> None:
    """It comes when one model was brought back and the other was not."""
    run = shared_kernel.run
    run(RESTORES)
    inside = Path(shared_kernel.home) / "inside"
    inside.unlink(missing_ok=True)
    result = shared_kernel.start(
        "%%distributed --devices 2 --strategy fsdp\nload('two', first, second)\nwhile True: time.sleep(0.05)"
    )
    shared_kernel.wait_for(inside.exists)
    shared_kernel.interrupt()
    shared_kernel.wait(result)
    assert run("print(held())").stdout in ("[1.0]\n", "[2.0]\n"), result.text
    run("%distributed stop")


LOADED = """
model, optimizer = make()
seen = []
nbtrain.load('third', model=model, optimizer=optimizer)
"""
EPOCHS = """
for number in nbtrain.resumable(range(5)):
    epoch()
    seen.append(number)
"""


@pytest.mark.thorough
def test_loops_go_on_once_from_what_the_notebook_has_loaded(kernel: Kernel) -> None:
    """Once their work is in the notebook: not of a cell that failed, and not again on other ranks."""
    run = kernel.run
    run(IN_A_NOTEBOOK)
    run("%%distributed -d 2\nfor number in nbtrain.resumable(range(3)):\n    epoch()\n    save('third')")
    run(LOADED)
    assert run("%%distributed -d 2" + EPOCHS + "    1 / 0").error is not None
    assert run("seen").value == "[]"
    assert run("%%distributed -d 2" + EPOCHS).error is None
    assert run("seen").value == "[3, 4]"
    run("%distributed restart")
    assert run("seen = []\nnbtrain.load('third', model=model)").error is None, "weights alone move no loop"
    assert run("%%distributed -d 2" + EPOCHS).error is None
    assert run("seen").value == "[0, 1, 2, 3, 4]"
    run(LOADED + EPOCHS)
    assert run("seen").value == "[3, 4]", "in the notebook itself"
    run("seen = []")
    assert run("%%distributed -d 2 -s fsdp" + EPOCHS).error is None
    assert run("seen").value == "[0, 1, 2, 3, 4]"
