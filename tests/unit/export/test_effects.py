"""Which statements of a history change, draw, seed or write what a cell needs."""

from __future__ import annotations

import builtins

import pytest

from nbtrain.export.needed_statements import Slice, needed, read_first, statements

FIRST = """import copy, json, random, torch
import numpy as np
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from sklearn.model_selection import train_test_split
X = torch.zeros(8, 4); Y = torch.zeros(8).long()
data = DataLoader(TensorDataset(X, Y))
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
opt = torch.optim.SGD(model.parameters(), 0.1)
other = nn.Linear(4, 2)
opt2 = torch.optim.SGD(other.parameters(), 0.1)"""


def sliced(*cells: str, names: str = "model opt data", saved: str = "") -> Slice:
    history = [one for number, text in enumerate(cells, 1) for one in statements(number, text)]
    return needed(history, names.split(), frozenset(dir(builtins)), frozenset(saved.split()))


def kept(*cells: str, names: str = "model opt data", saved: str = "") -> list[str]:
    return [one.text for one in sliced(FIRST, *cells, names=names, saved=saved).statements if one.cell > 1]


def whole(*cells: str) -> list[str]:
    return [one.text for number, text in enumerate(cells) for one in statements(number, text)]


@pytest.mark.parametrize("cells", [
    ["for p in model[0].parameters():\n    p.requires_grad = False"],
    ["for p in model.parameters(): p.requires_grad_(False)"],
    ["for name, p in model.named_parameters():\n    if '0' in name: p.requires_grad = False"],
    ["[p.requires_grad_(False) for p in model.parameters()]"],
    ["for g in opt.param_groups:\n    g['lr'] = 0.5"],
    ["opt.param_groups[0]['lr'] = 0.5"],
    ["for m in model.modules():\n    if isinstance(m, nn.Dropout): m.p = 0.5"],
    ["state = copy.deepcopy(model.state_dict())", "msg = model.load_state_dict(state)"],
    ["state = torch.load('w.pt')", "print(model.load_state_dict(state))"],
    ["with torch.no_grad():\n    w = model[0].weight\n    w.zero_()"],
    ["with torch.no_grad():\n    print(model[0].weight.fill_(1.0))"],
    ["head = model[1]", "nn.init.zeros_(head.weight)"],
    ["head = model[1]", "_ = nn.init.zeros_(head.weight)"],
    ["def freeze():\n    for p in model[0].parameters(): p.requires_grad_(False)", "freeze()"],
    ["def freeze():\n    for p in model[0].parameters(): p.requires_grad_(False)\n    return 3", "n = freeze()"],
    ["def freeze(m):\n    for p in m.parameters(): p.requires_grad_(False)", "x = freeze(model[0])"],
    ["def one(p): p.requires_grad_(False)", "def freeze(m):\n    for p in m.parameters(): one(p)", "freeze(model)"],
    ["freeze = lambda m: m.requires_grad_(False)", "x = freeze(model)"],
    ["def init(m): nn.init.zeros_(m.weight)", "x = list(map(init, [*model]))"],
    ["def init(m): m.weight.data.zero_()", "x = model.apply(init)"],
    ["class Freezer:\n    def __init__(self, m): self.m = m\n    def go(self): self.m.requires_grad_(False)",
     "freezer = Freezer(model)", "n = freezer.go()"],
    ["X *= 3"], ["X[0] = 1"], ["X.mul_(3)"], ["T = X.view(-1)", "T[0] = 5"], ["A = X.numpy()", "A[0] = 5"],
    ["loss = F.cross_entropy(model(X), Y)", "loss.backward()", "opt.step()"],
    ["x, y = next(iter(data))"], ["for x in [X, Y]: x.zero_()"],
    ["if True: model.requires_grad_(False)"], ["try:\n    model.eval()\nexcept Exception: pass"],
    ["del model[1]"], ["setattr(model, 'k', 3)"], ["model = model.to('cpu')"], ["model.to('cpu')"],
    ["torch.manual_seed(0)"], ["g = torch.manual_seed(0)"],
    ["def fix(): random.seed(3); np.random.seed(3)", "fix()"],
    ["with torch.no_grad():\n    for a, b in zip(model.parameters(), other.parameters()): a.copy_(b)"],
])  # fmt: skip
def test_what_changes_a_model_its_optimizer_or_its_data_is_kept(cells: list[str]) -> None:
    assert kept(*cells) == whole(*cells)


@pytest.mark.parametrize("cells", [
    ["n = sum(p.numel() for p in model.parameters())"], ["print(model.state_dict().keys())"], ["X.mean(); X.shape"],
    ["for p in model.parameters(): print(p.shape)"], ["for x, y in data: print(x.shape)"],
    ["for p in other.parameters(): p.requires_grad = False"], ["msg = other.load_state_dict({})"],
    ["for x, y in data:\n    loss = F.cross_entropy(other(x.float()), y)\n    opt2.zero_grad(); loss.backward()\n"
     "    opt2.step()"],
    ["def fit(m, o, loader):\n    for x, y in loader:\n        x = x.cpu()\n        loss = F.mse_loss(m(x), y)\n"
     "        o.zero_grad(); loss.backward(); o.step()\n    return loss.item()", "last = fit(other, opt2, data)"],
    ["X2 = X * 2", "X2 += 1"], ["X2 = X.clone()", "X2.zero_()"], ["Z, W = train_test_split(X)", "Z.zero_()"],
    ["torch.save(model.state_dict(), 'w.pt')"], ["np.save('x.npy', X)"], ["model.save('here')"],
    ["path = 'x'", "torch.save(model, path)"], ["with open('x.json', 'w') as f: json.dump(model.names, f)"],
    ["with open('x.txt', mode='a') as f:\n    f.write(str(model.pop()))"], ["f = open('log', 'w')"],
    ["if True:\n    torch.save(model, 'w.pt')"], ["model.to_csv('x.csv')"], ["model.pop().savefig('x.png')"],
])  # fmt: skip
def test_what_shows_writes_a_file_or_is_of_another_model_is_left_out(cells: list[str]) -> None:
    assert kept(*cells) == []


def test_a_loop_that_saves_is_kept_without_that() -> None:
    loop = "for e in range(2):\n    opt.step()\n    {}\n    if e:\n        {}\n"
    assert kept(loop.format("torch.save(model, 'a')", "with open('b', 'w') as f: f.write('x')")) == [
        loop.format("pass", "pass").strip()
    ]


def test_a_function_that_saves_and_changes_is_kept_and_known_for_it() -> None:
    found = sliced(FIRST, "def fit():\n    opt.step()\n    torch.save(model, 'w.pt')", "fit()").statements
    assert [one.text for one in found if one.effect.writes_inside] == ["fit()"]


def test_a_function_binds_global_names() -> None:
    assert kept("def setup():\n    global size\n    size = 3", "setup()", names="size")[-1] == "setup()"


def test_names_that_a_loop_binds_itself_are_not_those_of_an_earlier_one() -> None:
    assert kept("for p in other.parameters(): p.requires_grad_(False)", "for p in model.parameters(): p.zero_()") == [
        "for p in model.parameters(): p.zero_()"
    ]
    assert kept("with open('a', 'w') as f: f.write('')", "with open('a') as f: t = f.read()", names="t") == [
        "with open('a') as f: t = f.read()"
    ]
    assert read_first("for x, y in data:\n    z = model(x)\nprint(z)") >= {"data", "model", "print"}
    assert not read_first("for x, y in data:\n    z = model(x)\nprint(z)") & {"x", "y", "z"}


@pytest.mark.parametrize(("cell", "seeds", "draws"), [
    ("torch.manual_seed(0)", "torch", ""), ("np.random.seed(0)", "numpy", ""), ("random.seed(0)", "random", ""),
    ("set_seed(0)", "torch numpy random", ""),
    ("torch.cuda.manual_seed_all(0)", "", ""), ("g = torch.Generator().manual_seed(0)", "", ""),
    ("A = torch.randn(3)", "", "torch"), ("A = np.random.randn(3)", "", "numpy"),
    ("random.shuffle(A)", "", "random"),
    ("X.normal_()", "", "torch"), ("np.random.shuffle(A)", "", "numpy"), ("a = random.choice([1])", "", "random"),
    ("a, b = train_test_split(X)", "", "numpy"), ("a, b = train_test_split(X, random_state=3)", "", ""),
    ("a, b = train_test_split(X, random_state=None)", "", "numpy"), ("rng = np.random.default_rng(3)", "", ""),
    ("rng = np.random.default_rng()", "", "numpy"), ("df = df.sample(frac=1)", "", "numpy"),
    ("a = torch.randn(3, generator=g)", "", ""), ("torch.manual_seed(0); torch.randn(3)", "torch", "torch"),
    ("def make(): return torch.randn(3)\nA = make()", "", "torch"),
    ("def make():\n    torch.manual_seed(0)\n    return torch.randn(3)\nA = make()", "torch", ""),
    ("class D:\n    def __init__(self): self.x = np.random.rand(3)\nd = D()", "", "numpy"),
    ("f = lambda: torch.randn(3)", "", ""), ("def noisy(x): return torch.randn(3)\nd = D(noisy)", "", ""),
    ("order = [random.random() for _ in range(3)]", "", "random"),
])  # fmt: skip
def test_random_numbers_by_library(cell: str, seeds: str, draws: str) -> None:
    found = statements(2, cell)
    needed([*statements(1, FIRST), *found], [])
    assert frozenset().union(*(one.effect.seeds for one in found)) == set(seeds.split())
    assert frozenset().union(*(one.effect.draws for one in found)) == set(draws.split())


def test_what_is_saved_is_as_it_is_at_the_end() -> None:
    assert kept("A = torch.randn(3)", "A *= 3", "D = TensorDataset(A)", names="D", saved="A") == [
        "D = TensorDataset(A)"
    ]
