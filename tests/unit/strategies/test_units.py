"""Which parts of a model are gathered as one."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from nbtrain.base.errors import UsageError
from nbtrain.strategies.kit.units_to_wrap import check_rule, find_units, wrap


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.attention(x))


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.body = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(3)), "norm": nn.LayerNorm(4)})
        self.activation = nn.Tanh()
        self.head = nn.Linear(4, 9, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def names(model: nn.Module, rule: Any = ()) -> list[str]:
    known = {id(module): name for name, module in model.named_modules()}
    return [known[id(unit)] for unit in find_units(model, rule)]


BLOCKS = [f"body.layers.{i}" for i in range(3)]


def test_repeated_blocks_and_the_roots_other_children() -> None:
    assert names(Model()) == ["embed", *BLOCKS, "body.norm", "head", ""]


def test_what_is_tied_stays_in_one_unit() -> None:
    assert names(Model(tied=True)) == [*BLOCKS, "body.norm", ""]
    model = Model()
    model.body["layers"][2].attention.q.weight = model.body["layers"][0].attention.q.weight  # type: ignore[index]
    assert names(model) == ["embed", "body.layers.1", "body.norm", "head", ""]
    shared = Model()
    shared.body["layers"][1].attention = shared.body["layers"][0].attention  # type: ignore[index]
    assert names(shared) == ["embed", "body.layers.2", "body.norm", "head", ""]
    assert names(shared, Attention) == ["body.layers.0.attention", "body.layers.2.attention", ""]


def test_a_layer_that_is_used_several_times_is_one_unit() -> None:
    block = Block()
    assert names(nn.Sequential(block, block, nn.Linear(4, 4))) == ["0", "2", ""]


def test_blocks_below_a_part() -> None:
    class Encoder(Model):
        pass

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()
            self.head = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    assert names(Outer()) == [*(f"encoder.{name}" for name in BLOCKS), "encoder", "head", ""]


@pytest.mark.parametrize(("rule", "found"), [
    (Attention, [f"{name}.attention" for name in BLOCKS]),
    ("Attention", [f"{name}.attention" for name in BLOCKS]),
    ("Embedding, Attention", ["embed", *(f"{name}.attention" for name in BLOCKS)]),
    ((Attention, "Block"), [n for name in BLOCKS for n in (f"{name}.attention", name)]),
    (25, ["embed", *BLOCKS, "head"]),
    (2.5e1, ["embed", *BLOCKS, "head"]),
    (60, []),
    pytest.param(
        lambda module: isinstance(module, nn.LayerNorm), [*(f"{name}.norm" for name in BLOCKS), "body.norm"],
        id="a function",
    ),
    (nn.ModuleList, []),
    (nn.Tanh, []),
], ids=str)  # fmt: skip
def test_rules(rule: Any, found: list[str]) -> None:
    check_rule(rule)
    assert names(Model(), rule) == [*found, ""]


def test_a_class_that_was_defined_anew_is_the_same_class() -> None:
    again = type("Block", (nn.Module,), {"__qualname__": "Block"})
    assert names(Model(), again) == [*BLOCKS, ""]


def test_by_hand() -> None:
    model = Model()
    assert wrap(model.body["layers"][1].attention) is model.body["layers"][1].attention  # type: ignore[index]
    assert names(model, "Embedding") == ["embed", "body.layers.1.attention", ""]
    assert isinstance(wrap(nn.Linear(2, 2))(torch.ones(1, 2)), torch.Tensor)
    with pytest.raises(UsageError, match=r"nbtrain\.wrap takes a module, not int"):
        wrap(3)  # type: ignore[type-var]


def test_rules_that_find_nothing_by_their_name() -> None:
    with pytest.raises(UsageError, match="--wrap Blok: Model has no such part; it has Attention, Block, Embedding"):
        find_units(Model(), "Blok")
    with pytest.raises(UsageError, match="--wrap Conv2d: Model has no such part"):
        find_units(Model(), nn.Conv2d)


@pytest.mark.parametrize("policy", [
    partial(size_based_auto_wrap_policy, min_num_params=20),
    ModuleWrapPolicy({Block}),
    partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    CustomPolicy(lambda module: True),
], ids=["size", "modules", "transformer", "custom"])  # fmt: skip
def test_for_a_policy_of_torch_there_is_a_rule(policy: Any) -> None:
    with pytest.raises(UsageError, match="write its classes, its min_num_params, or its lambda_fn"):
        check_rule(policy)
