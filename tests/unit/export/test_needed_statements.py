"""Which statements of a history a cell needs, and how its loops are written for a script."""

from __future__ import annotations

import pytest

from nbtrain.export.needed_statements import needed, statements
from nbtrain.export.rewrite_loops import dealt_loops


def kept(cells: list[str], names: str) -> tuple[list[str], set[str]]:
    history = [one for number, text in enumerate(cells, 1) for one in statements(number, text)]
    found = needed(history, names.split(), frozenset(dir(__builtins__)) | {"print", "range", "sum", "len"})
    return [one.text for one in found.statements], found.missing


@pytest.mark.parametrize(
    ("cells", "names", "wanted"),
    [
        (["x = 1\ny = 2", "z = x + 1"], "z", ["x = 1", "z = x + 1"]),
        (["x = 1", "x = 2"], "x", ["x = 2"]),
        (["x = [1]", "x.append(2)", "x"], "x", ["x = [1]", "x.append(2)"]),
        (["x = [1]", "print(x)", "x.sort; y = 3"], "x", ["x = [1]"]),
        (["x = [1]", "x[0] = 5", "x.name = 3"], "x", ["x = [1]", "x[0] = 5", "x.name = 3"]),
        (["n = 1", "n += 2"], "n", ["n = 1", "n += 2"]),
        (["import os", "import sys", "p = os.getcwd()"], "p", ["import os", "p = os.getcwd()"]),
        (["def f(): return g() + k", "def g(): return 2", "k = 3", "k = 4"], "f",
         ["def f(): return g() + k", "def g(): return 2", "k = 4"]),
        (["class A: rate = r", "r = 1"], "A", ["class A: rate = r", "r = 1"]),
        (["r = 1", "class A:\n    def f(self): return r"], "A", ["r = 1", "class A:\n    def f(self): return r"]),
        (["m = make(3)", "def make(n): return n"], "m", ["m = make(3)"]),
        (["import torch", "torch.manual_seed(0)", "q = torch.ones(1)"], "q",
         ["import torch", "torch.manual_seed(0)", "q = torch.ones(1)"]),
        (["import torch", "torch.manual_seed(0)", "q = 1"], "q", ["q = 1"]),
        (["def f(): return m", "m = 1", "m = 2"], "f", ["def f(): return m", "m = 2"]),
        (["class A:\n    def f(self): return r", "r = 1", "a = A()", "r = 2"], "a",
         ["class A:\n    def f(self): return r", "r = 1", "a = A()", "r = 2"]),
        (["if True:\n    x = 1\nelse:\n    x = y", "y = 2"], "x", ["if True:\n    x = 1\nelse:\n    x = y"]),
        (["from torch import nn", "m = nn.Linear(1, 1)", "nn.init.zeros_(m.weight)"], "m",
         ["from torch import nn", "m = nn.Linear(1, 1)", "nn.init.zeros_(m.weight)"]),
        (["x = get_ipython().run_line_magic('who', '')", "y = 1"], "y", ["y = 1"]),
        (["from functools import cache", "@cache\ndef f(): return 1"], "f",
         ["from functools import cache", "@cache\ndef f(): return 1"]),
        (["xs = [a * b for a in range(3)]", "b = 2"], "xs", ["xs = [a * b for a in range(3)]", "b = 2"]),
    ],
)  # fmt: skip
def test_what_a_cell_needs(cells: list[str], names: str, wanted: list[str]) -> None:
    assert kept(cells, names)[0] == wanted


def test_what_no_cell_makes_is_missing() -> None:
    assert kept(["y = x + 1"], "y") == (["y = x + 1"], {"x"})
    assert kept([], "x f")[1] == {"x", "f"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("for x, y in loader:\n    loss.backward()", "for x, y in dealt(loader):\n    loss.backward()"),
        ("for i, b in enumerate(tqdm(loader)):\n    o.step()",
         "for i, b in enumerate(tqdm(dealt(loader))):\n    o.step()"),
        ("for x in loader:\n    total += f(x)", "for x in whole(loader):\n    total += f(x)"),
        ("a = sum(f(x) for x in loader)", "a = sum(f(x) for x in whole(loader))"),
        ("for x in other:\n    o.step()", "for x in other:\n    o.step()"),
        ("def train(data):\n    for x in data:\n        o.step()",
         "def train(data):\n    for x in dealt(data):\n        o.step()"),
        ("for e in range(2):\n    for x in loader:\n        o.step()\n    s.step()",
         "for e in range(2):\n    for x in dealt(loader):\n        o.step()\n    s.step()"),
        ("é = 'ü'; n = [f(x) for x in loader]", "é = 'ü'; n = [f(x) for x in whole(loader)]"),
    ],
)  # fmt: skip
def test_loops_of_a_script(text: str, wanted: str) -> None:
    assert dealt_loops(text, {"loader"})[0] == wanted
