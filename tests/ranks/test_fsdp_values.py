"""Numbers that a cell reads out of a model in pieces are the whole model's; recurrent layers; parts that are called."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nbtrain.strategies.fsdp import whole_values
from tests.ranks.test_fsdp import Stage
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook
from tests.support.ranks import run_on_ranks

Tensors = list[torch.Tensor]

NUMBERS: dict[str, Callable[[Tensors], Any]] = {
    "float": lambda ps: float(sum(p.abs().sum() for p in ps)),
    "item": lambda ps: torch.linalg.vector_norm(ps[0]).item(),
    "stacked": lambda ps: torch.stack([p.norm() for p in ps]).norm().item(),
    "largest": lambda ps: float(ps[0].max()),
    "count": lambda ps: int((ps[0] > 0).sum()),
    "plus": lambda ps: float((ps[0] ** 2).sum() + torch.tensor(1.0)),
    "log": lambda ps: math.log((ps[0] * ps[0]).sum()),
    "truth": lambda ps: bool((ps[0] > 0.4).any()),
    "compared": lambda ps: 1 if (ps[0] ** 2).sum() > 2 else 0,
    "printed": lambda ps: str((ps[0] ** 2).sum()),
    "formatted": lambda ps: f"{(ps[0] ** 2).sum():.3f} {sum(p.abs().sum() for p in ps):.3f}",
    "one row": lambda ps: ps[1][-1].item(),
}


def read(stage: Stage, wrapped: int = 1) -> dict[str, Any]:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(wrapped)]
    prepared = [stage.set_up([model]) for model in models]
    for one in prepared:
        one.enter()
    models[0](torch.ones(4, 5)).sum().backward()
    held = [p.detach() for p in models[0].parameters()]
    grads = [p.grad for p in models[0].parameters() if p.grad is not None]
    found = {f"{name} of {what}": number(ts) for what, ts in (("weights", held), ("gradients", grads))
             for name, number in NUMBERS.items()}  # fmt: skip
    for one in prepared:
        one.leave()
    return found


def close_to(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        same = found[name] == value if isinstance(value, str) else math.isclose(found[name], value, rel_tol=1e-5)
        assert same, (name, found[name], value)


def on_a_rank(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    before = torch.autograd.backward, torch.autograd.grad, dict(vars(DTensor)), dict(vars(DTensor._op_dispatcher))  # type: ignore[attr-defined]
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)  # type: ignore[attr-defined]
    found = read(Stage(True, **options), wrapped=2)
    after = torch.autograd.backward, torch.autograd.grad, dict(vars(DTensor)), dict(vars(DTensor._op_dispatcher))  # type: ignore[attr-defined]
    assert after == before
    assert not whole_values.active()
    assert handlers == DTensor._op_dispatcher._custom_op_handlers  # type: ignore[attr-defined]
    return found


def test_numbers_are_those_of_the_whole() -> None:
    wanted = read(Stage(False))
    for found in run_on_ranks(on_a_rank, {}):
        close_to(found, wanted)


def test_numbers_of_replicas() -> None:
    wanted = read(Stage(False))
    for found in run_on_ranks(on_a_rank, {"sharding": "HYBRID_SHARD", "replicas": 2}, world_size=4):
        close_to(found, wanted)


def copies(rank: int) -> list[Any]:
    stage = Stage(True, sharding="SHARD_GRAD_OP")
    torch.manual_seed(0)
    model = nn.Sequential(nn.GRU(5, 7), nn.Identity())
    prepared = stage.set_up([model])
    prepared.enter()
    best = None
    for _ in range(3):
        best = copy.deepcopy(model)
    kept = [len(prepared.trees), len(prepared.component.modules)]  # type: ignore[attr-defined]
    model(torch.ones(2, 3, 5))[0].sum()  # gathered, and nothing lets go of it
    prepared.leave()
    assert best is not None
    del best
    prepared.enter()
    model(torch.ones(2, 3, 5))[0].sum().backward()
    total = prepared.clip(model.parameters(), 1e9, 2.0)
    prepared.leave()
    layer: Any = model[0]
    whole = [a is b for a, b in zip(layer._flat_weights, layer.parameters(), strict=True)]
    return [*kept, len(prepared.trees), total is not None, all(whole)]  # type: ignore[attr-defined]


def test_copies_are_let_go_of() -> None:
    # The one before is held while the next is made.
    assert run_on_ranks(copies) == [[3, 3, 1, True, True]] * 2


# --- in a kernel -----------------------------------------------------------------------------------

MODELS = """
import copy
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(2, 6, 2, batch_first=True)
        self.deep = nn.Sequential(nn.GRU(6, 6, batch_first=True))
        self.head = nn.Linear(6, 2)
    def forward(self, x):
        return self.head(self.deep(self.rnn(x.view(-1, 2, 2))[0])[0][:, -1])
class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
    def forward(self, x):
        return self.proj(x)
class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(Inner()))
        self.head = nn.Linear(4, 2)
    def forward(self, x):
        return self.head(self.body[0][0](x))
loader = DataLoader(data, batch_size=48)
"""
TRAIN = "for x, y in loader: F.cross_entropy({0}(x), y).backward(); {1}.step(); {1}.zero_grad()\n"
ALIKE = "print(all(torch.allclose(a, b, atol=1e-5) for a, b in zip({0}.parameters(), {1}.parameters())))"
LINE = "%%distributed -s fsdp --devices 2 --split-batches\n"


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    made(MODELS)
    yield made
    made("%distributed stop")


def test_cells(notebook: Notebook) -> None:
    # Recurrent layers keep lists of their weights besides.
    notebook("model = Tagger(); first = copy.deepcopy(model); opt = adamw(model); opt1 = adamw(first)")
    for _ in range(2):
        notebook(LINE + TRAIN.format("model", "opt"))
        notebook(TRAIN.format("first", "opt1"))
        assert notebook(ALIKE.format("model", "first")).text.strip() == "True"
    lists = "[a is b for a, b in zip(model.rnn._flat_weights, model.rnn.parameters())]"
    assert notebook(f"print(all({lists}), len({lists}))").text.split() == ["True", "8"]
    notebook(LINE.replace("fsdp", "ddp") + TRAIN.format("model", "opt"))
    notebook(TRAIN.format("first", "opt1"))
    assert notebook(ALIKE.format("model", "first")).text.strip() == "True"

    # Norms: shown, and assigned to names.
    squares = "sum(p.detach().pow(2).sum() for p in model.parameters())"
    turned = "turned = model.head.weight.detach().T; held = [n * 2]"
    wanted = notebook(f"print(f'{{{squares}:.3f}}')").text.strip()
    shown = notebook(LINE + f"n = {squares}; {turned}\nif rank == 0: mine = n.detach()\nprint(f'{{n:.3f}}')\nn").text
    for text in (wanted, "this rank's part", "mine stays on the ranks"):
        assert text in shown
    check = f"abs(n - {squares}) < 1e-3, abs(held[0] - 2 * n) < 1e-3, torch.equal(turned, model.head.weight.T)"
    assert "False" not in notebook(f"print({check}, type(n) is torch.Tensor)").text

    # One rank alone is told so, also where torch itself moves something.
    for line in ("print(n)", "n.sqrt()"):
        error = notebook.fails(LINE + f"n = {squares}\nif rank == 0: {line}")
        assert "norm = float(norm)" in error.evalue
        assert "rank 1 has come to the end" in error.evalue

    # A part that nobody gathers, and weights that meet a batch.
    notebook("model = Outer(); first = copy.deepcopy(model); opt = adamw(model); opt1 = adamw(first)")
    for line in (LINE, LINE.replace("\n", " --wrap Inner\n")):
        notebook(line + TRAIN.format("model", "opt") + "met = X[:4] @ model.head.weight.T")
        notebook(TRAIN.format("first", "opt1") + "alone = X[:4] @ first.head.weight.T")
        assert notebook(ALIKE.format("model", "first")).text.strip() == "True"
        assert notebook("print(torch.allclose(met, alone, atol=1e-5))").text.strip() == "True"

    # A policy that reads a name of the notebook.
    notebook("from torch.distributed.fsdp.wrap import CustomPolicy; least = 1")
    notebook("policy = CustomPolicy(lambda module: sum(p.numel() for p in module.parameters()) > least)")
    notebook(LINE.replace("\n", " --wrap policy\n") + TRAIN.format("model", "opt"))
