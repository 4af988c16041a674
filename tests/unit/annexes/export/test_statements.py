"""Which statements of a history a script has."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

import nbtrain
from nbtrain.annexes.export.statements import Kept, kept, statements

NAMESPACE: dict[str, Any] = {"torch": torch, "plt": plt, "nbtrain": nbtrain, "model": torch.nn.Linear(1, 1)}


def of(cells: list[str], wanted: str) -> Kept:
    history = [one for number, text in enumerate(cells, 1) for one in statements(number, text)]
    return kept(history, wanted.split(), NAMESPACE)


@pytest.mark.parametrize(("cells", "wanted"), [
    (["x = 1\ny = f(2)", "z = g(x)"], ["x = 1", "y = f(2)", "z = g(x)"]),
    (["x = 1", "x = 2", "z = x"], ["x = 2", "z = x"]),
    (["x = 1", "x += 2", "z = x"], ["x = 1", "x += 2", "z = x"]),
    (["import os", "import sys", "z = os.getcwd()"], ["import os", "z = os.getcwd()"]),
    (["from os.path import *", "z = 1"], ["from os.path import *", "z = 1"]),
    (["def f(): return k", "def g(): return 2", "k = 3", "k = 4", "z = f()"],
     ["def f(): return k", "k = 4", "z = f()"]),
    (["def f(): return 1", "a = f()", "def f(): return 2", "z = f()"],
     ["def f(): return 1", "a = f()", "def f(): return 2", "z = f()"]),
    (["def f(): return 1", "def f(): return 2", "z = f()"], ["def f(): return 2", "z = f()"]),
    (["@cached\ndef f(): return 1", "z = 1"], ["@cached\ndef f(): return 1", "z = 1"]),
    (["z = get_ipython().run_line_magic('who', '')", "z = 1"], ["z = 1"]),
    (["x = 1", "exec(code)"], ["x = 1", "exec(code)"]),
    (["# about z\nz = f(1)  # one\n# nothing", "z"], ["# about z\nz = f(1)  # one"]),
    (["z = [0]; é = 'ü'; z.append(é)"], ["z = [0]", "é = 'ü'", "z.append(é)"]),
    (["for p in model.parameters(): p.requires_grad = False", "z = 1"],
     ["for p in model.parameters(): p.requires_grad = False", "z = 1"]),
    (["print(model.load_state_dict(s))", "model.eval()", "x, y = next(iter(data))", "z = 1"],
     ["print(model.load_state_dict(s))", "model.eval()", "x, y = next(iter(data))", "z = 1"]),
    (["fig, ax = plt.subplots()\nax.plot(fit())", "z = 1"], ["fig, ax = plt.subplots()", "ax.plot(fit())", "z = 1"]),
])  # fmt: skip
def test_what_does_nothing_is_left_out(cells: list[str], wanted: list[str]) -> None:
    assert [one.text for one in of(cells, "z").statements] == wanted


@pytest.mark.parametrize("cell", [
    "X.shape", "print(model)", "print(x.mean().item(), len(x))", "df.head()", "fig, ax = plt.subplots()\nax.plot(x)",
    "import matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()", "torch.save(model.state_dict(), 'w.pt')",
    "with open('x.json', 'w') as f: json.dump(x, f)", "df.to_csv('x.csv')",
    "sum(p.numel() for p in model.parameters())", "h = nbtrain.history()\nh.plot()",
])  # fmt: skip
def test_what_shows_writes_a_file_or_is_of_nbtrain_is_left_out(cell: str) -> None:
    assert of([cell], "z").statements == []


def test_a_loop_that_saves_is_kept_without_that() -> None:
    loop = "for e in range(2):\n    opt.step()\n    {}\n    if e:\n        {}"
    found = of([loop.format("torch.save(model, 'a')", "with open('b', 'w') as f: f.write('x')")], "z").statements
    assert [one.text for one in found] == [loop.format("pass", "pass")]


def test_what_needs_nbtrain_is_lost() -> None:
    found = of(["import nbtrain\nwith nbtrain.empty(): net = make()", "opt = SGD(net.parameters())", "z = 1"], "z")
    assert [one.text for one in found.statements] == ["z = 1"]
    assert found.lost.keys() == {"net", "opt"}
