"""Numbers that a cell reads out of a model in pieces are the whole model's; recurrent layers; parts that are called."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from nbtrain.strategies.fsdp import piece_functions
from tests.support.fsdp import Stage
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


def on_a_rank(rank: int) -> dict[str, Any]:
    before = torch.autograd.backward, torch.autograd.grad, dict(vars(DTensor)), dict(vars(DTensor._op_dispatcher))  # type: ignore[attr-defined]
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)  # type: ignore[attr-defined]
    found = read(Stage(True), wrapped=2)
    after = torch.autograd.backward, torch.autograd.grad, dict(vars(DTensor)), dict(vars(DTensor._op_dispatcher))  # type: ignore[attr-defined]
    assert after == before
    assert not piece_functions.listening.owners
    assert handlers == DTensor._op_dispatcher._custom_op_handlers  # type: ignore[attr-defined]
    return found


def test_numbers_are_those_of_the_whole() -> None:
    wanted = read(Stage(False))
    for found in run_on_ranks(on_a_rank):
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
