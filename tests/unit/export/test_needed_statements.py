"""Which statements of a history a cell needs, and how its loops are written for a script."""

from __future__ import annotations

import builtins
import os

import pytest
import torch

from nbtrain.errors import NotSupported
from nbtrain.export.accumulation import accumulated
from nbtrain.export.needed_statements import needed, statements
from nbtrain.export.possible_loaders import Loaders
from nbtrain.export.rewrite_loops import dealt_loops, functions


def kept(cells: list[str], names: str) -> tuple[list[str], set[str]]:
    history = [one for number, text in enumerate(cells, 1) for one in statements(number, text)]
    found = needed(history, names.split(), frozenset(dir(builtins)))
    return [one.text for one in found.statements], found.missing


@pytest.mark.parametrize(("cells", "names", "wanted"), [
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
])  # fmt: skip
def test_what_a_cell_needs(cells: list[str], names: str, wanted: list[str]) -> None:
    assert kept(cells, names)[0] == wanted


def test_a_name_that_was_deleted_is_none_of_the_notebook() -> None:
    assert kept(["def g(): return 1", "def f(): return g()", "del g"], "f") == (["def f(): return g()"], {"g"})


def test_what_no_cell_makes_is_missing() -> None:
    assert kept(["y = x + 1"], "y") == (["y = x + 1"], {"x"})
    assert kept([], "x f")[1] == {"x", "f"}


@pytest.mark.parametrize(("text", "wanted"), [
    ("for x, y in loader:\n    loss.backward()", "for x, y in dealt(loader):\n    loss.backward()"),
    ("for i, b in enumerate(tqdm(loader)):\n    o.step()", "for i, b in enumerate(tqdm(dealt(loader))):\n    o.step()"),
    ("for x in loader:\n    total += f(x)", "for x in dealt_if_training(loader):\n    total += f(x)"),
    ("with torch.no_grad():\n    a = sum(f(x) for x in loader)",
     "with torch.no_grad():\n    a = sum(f(x) for x in whole(loader))"),
    ("@torch.no_grad()\ndef f(data):\n    for x in data: g(x)",
     "@torch.no_grad()\ndef f(data):\n    for x in whole(data): g(x)"),
    ("for x in loader:\n    with torch.no_grad():\n        g(x)",
     "for x in whole(loader):\n    with torch.no_grad():\n        g(x)"),
    ("for x in loader: step_on(x)", "for x in dealt(loader): step_on(x)"),
    ("for x in loader: measure(x)", "for x in whole(loader): measure(x)"),
    ("def run(data, train):\n    for x in data:\n        if train:\n            o.step()",
     "def run(data, train):\n    for x in dealt_if_training(data):\n        if train:\n            o.step()"),
    ("def run(data, epochs):\n    for e in range(epochs):\n        for x in data: o.step()",
     "def run(data, epochs):\n    for e in range(epochs):\n        for x in dealt(data): o.step()"),
    ("with torch.no_grad():\n    for x in loader: n += g(x)\nn = reduce(n, 'sum')",
     "with torch.no_grad():\n    for x in dealt(loader): n += g(x)\nn = reduce(n, 'sum')"),
    ("for x in loader: o.step()\nprint(s / len(loader))",
     "for x in dealt(loader): o.step()\nprint(s / len(dealt(loader)))"),
    ("for p in phases:\n    for x in both[p]:\n        if p: o.step()",
     "for p in phases:\n    for x in dealt_if_training(both[p]):\n        if p: o.step()"),
    ("for x in self.data: o.step()", "for x in dealt(self.data): o.step()"),
    ("bar = tqdm(loader)", "bar = tqdm(dealt_if_training(loader))"),
    ("for x in other:\n    o.step()", "for x in other:\n    o.step()"),
    ("def train(data):\n    for x in data:\n        o.step()",
     "def train(data):\n    for x in dealt(data):\n        o.step()"),
    ("for e in range(2):\n    for x in loader:\n        o.step()\n    s.step()",
     "for e in range(2):\n    for x in dealt(loader):\n        o.step()\n    s.step()"),
    ("é = 'ü'; n = [f(x) for x in loader]", "é = 'ü'; n = [f(x) for x in dealt_if_training(loader)]"),
])  # fmt: skip
def test_loops_of_a_script(text: str, wanted: str) -> None:
    train, evaluate = functions(["def step_on(x): o.step()", "@torch.no_grad()\ndef measure(x): return g(x)"])
    loaders = Loaders(frozenset({"loader"}), frozenset({"both"}), frozenset({"data"}), train, evaluate)
    assert dealt_loops(text, loaders)[0] == wanted


STEP = "    for x in {}: o.step()"
OF_CALLS = [
    ("for x in DataLoader(d, 8): o.step()", "for x in dealt(DataLoader(d, 8)): o.step()"),
    ("for x in tqdm(utils.data.DataLoader(d)): o.step()", "for x in tqdm(dealt(utils.data.DataLoader(d))): o.step()"),
    ("for x in dm.train_loader(): o.step()", "for x in dealt(dm.train_loader()): o.step()"),
    ("with torch.no_grad():\n    n = sum(f(x) for x in dm.loader())",
     "with torch.no_grad():\n    n = sum(f(x) for x in whole(dm.loader()))"),
    ("mine = DataLoader(d)\nfor x in mine: o.step()", "mine = DataLoader(d)\nfor x in dealt(mine): o.step()"),
    ("def f(d):\n    mine = DataLoader(d)\n" + STEP.format("mine"),
     "def f(d):\n    mine = DataLoader(d)\n" + STEP.format("dealt(mine)")),
    ("def f(d):\n    a, b = dm.both()\n" + STEP.format("a"),
     "def f(d):\n    a, b = dm.both()\n" + STEP.format("dealt(a)")),
    ("def f(d):\n    own = {'a': DataLoader(d)}\n" + STEP.format("own['a']"),
     "def f(d):\n    own = {'a': DataLoader(d)}\n" + STEP.format("dealt(own['a'])")),
    ("def f(d):\n    def g():\n    " + STEP.format("d").replace("\n", "\n    "),
     "def f(d):\n    def g():\n    " + STEP.format("dealt(d)")),
    ("class A:\n  def __init__(self, d): self.l = DataLoader(d)\n  def fit(self):\n" + STEP.format("self.l"),
     "class A:\n  def __init__(self, d): self.l = DataLoader(d)\n  def fit(self):\n" + STEP.format("dealt(self.l)")),
    ("class A:\n  @property\n  def l(self): return DataLoader(d)\n  def fit(self):\n" + STEP.format("self.l"),
     "class A:\n  @property\n  def l(self): return DataLoader(d)\n  def fit(self):\n" + STEP.format("dealt(self.l)")),
    ("def f(folds):\n    for one in folds.values():\n    " + STEP.format("one"),
     "def f(folds):\n    for one in folds.values():\n    " + STEP.format("dealt(one)")),
    ("steps = iter(dm.loader())\nx = next(steps)", "steps = iter(dealt_if_training(dm.loader()))\nx = next(steps)"),
    ("for x in made(): o.step()", "for x in dealt(made()): o.step()"),
    ("for x in progress(loader): o.step()", "for x in dealt(progress(dealt(loader))): o.step()"),
    ("for x in (loader if a else other): o.step()", "for x in (dealt(loader) if a else other): o.step()"),
    *((one, one) for one in (
        "for e in range(3): o.step()", "for a, b in zip([1], 'ab'): o.step()", "for e in sorted(k): o.step()",
        "for x in X.split(8): o.step()", "for n, p in model.named_parameters(): o.step()", "for x in X: o.step()",
        "for i in torch.randperm(9): o.step()", "for i in torch.randperm(9).split(3): o.step()",
        "for x in batches(loader): o.step()", "for f in os.listdir(p): o.step()", "for e in epochs(3): o.step()",
        "for n in 'a b'.split(): o.step()", "n = [len(a) for a in names[1:]]",
        "class A:\n    def __init__(self, parts): self.parts = parts\n"
        "    def forward(self, x):\n        for one in self.parts: x = one(x)\n        return x",
        "def f(n):\n    rows = [1, 2]\n    for one in rows: o.step()",
        "def collate(d):\n    return [torch.stack(one) for one in zip(*[(1, 2)])]",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), OF_CALLS)
def test_loops_over_what_may_be_a_loader(text: str, wanted: str) -> None:
    """What is certainly none stays as it is."""
    of_functions = (
        "def batches(l):\n    for x in l: yield x", "def made(): return DataLoader(d)",
        "def epochs(n): return range(n)",
    )  # fmt: skip
    namespace = {"torch": torch, "os": os, "X": torch.ones(9), "names": ["a"], "model": torch.nn.Linear(1, 1)}
    loaders = Loaders(frozenset({"loader"}), namespace=namespace, texts=of_functions)
    found = dealt_loops(text, loaders)[0]
    assert (
        found.replace("batches(dealt(loader))", "batches(loader)").replace("Own(dealt(loader))", "Own(loader)")
        == wanted
    )


@pytest.mark.parametrize(("text", "wanted"), [
    ("for x in d: f(x).backward(); o.step(); s.step()",
     "for x in d:\n    accumulation.backward(f(x))\n    if accumulation.due:\n        o.step()\n        s.step()"),
    ("l.backward(retain_graph=True)", "accumulation.backward(l, retain_graph=True)"),
    ("for e in r:\n    for x in d:\n        l.backward()\n    s.step()",
     "for e in r:\n    for x in d:\n        accumulation.backward(l)\n    s.step()"),
    ("for e in r:\n    for x in d: l.backward(); break\n    s.step()",
     "for e in r:\n    for x in d: accumulation.backward(l); break\n    if accumulation.due:\n        s.step()"),
    ("n = clip_grad_norm_(p, 1.0)", 'n = clip_grad_norm_(p, 1.0 if accumulation.due else float("inf"))'),
    ("if a: o.step()\nelse: g()", "if a:\n    if accumulation.due:\n        o.step()\nelse: g()"),
])  # fmt: skip
def test_steps_that_wait_for_several_batches(text: str, wanted: str) -> None:
    assert accumulated(text, {}) == wanted


@pytest.mark.parametrize(
    "text", ["for x in d:\n    a.backward(); b.backward()", "l = o.step(f)", "torch.autograd.backward(l)"]
)
def test_steps_that_cannot_wait(text: str) -> None:
    with pytest.raises(NotSupported, match="export with --accumulate: "):
        accumulated(text, {})
