"""Models that are made without memory: what fills them, for how many ranks, and how much of it exists at a time."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import nbtrain
from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.strategies.base import Component, Strategy
from nbtrain.worker.precision.low_precision_weights import LowPrecisionStrategy, LowPrecisionWeights
from nbtrain.worker.setup.components import Components
from nbtrain.worker.setup.meta_init import MetaInit
from tests.support.absent import absent
from tests.support.ranks import run_on_ranks

CPU = torch.device("cpu")


class EveryLayer(nn.Module):
    """With a sort of layer for each way in which weights are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 16, padding_idx=0)
        self.place = nn.Parameter(torch.full((5, 16), 0.25))
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
        self.norm = nn.BatchNorm1d(5)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.emb(x) + self.place, mask=self.mask == 0)
        return self.head(self.rnn(self.norm(x))[0])


def made(seed: int = 1) -> EveryLayer:
    torch.manual_seed(seed)
    with nbtrain.empty():
        return EveryLayer()


def filled(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Any:
    blanks = MetaInit.of(Component({"model": model}, {str(i): one for i, one in enumerate(optimizers)}))
    assert blanks.fill(CPU) == []
    return model


def weights(rank: int, seed: int = 1) -> list[torch.Tensor]:
    return [p.detach() for p in filled(made(seed + rank)).parameters()]  # each rank has a stream of its own


def test_without_memory_and_with_what_constructors_compute() -> None:
    model = made()
    assert {name for name, p in model.named_parameters() if not p.is_meta} == {"place"}
    assert model.mask.sum() == 15
    assert not nn.Linear(2, 2).weight.is_meta
    with nbtrain.empty(), nbtrain.empty():
        pass
    assert not nn.Linear(2, 2).weight.is_meta
    assert nbtrain.empty(nn.Linear, 2, out_features=3).weight.is_meta

    lazy = filled(nbtrain.empty(lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))))
    assert lazy(torch.ones(2, 5)).shape == (2, 3)

    @nbtrain.empty()
    def configure_model() -> nn.Module:
        return nn.Linear(2, 2)

    assert configure_model().weight.is_meta


def test_filled_as_torch_would_have() -> None:
    model = made()
    optimizer, held = torch.optim.AdamW(model.parameters()), list(model.parameters())
    stream = torch.get_rng_state()
    filled(model, optimizer)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(p is q for p, q in zip(held, model.parameters(), strict=True))
    model(torch.randint(40, (4, 5))).sum().backward()
    optimizer.step()
    assert model.head.weight is model.emb.weight

    model = filled(made())
    attention = model.encoder.layers[0].self_attn
    assert not attention.out_proj.bias.any()  # what the parent does to it
    assert not model.emb.weight[0].any()
    assert 0.9 < model.emb.weight.std() < 1.1  # as an embedding, not as a linear layer
    one, other = model.encoder.layers
    assert torch.equal(one.linear1.weight, other.linear1.weight)  # torch makes one a copy of the other
    assert (model.place == 0.25).all()


def test_the_same_for_any_number_of_ranks_and_another_for_another_seed() -> None:
    alone = weights(0)
    for ranks in (2, 3):
        for found in run_on_ranks(weights, world_size=ranks):
            assert all(map(torch.equal, alone, found))
    assert not torch.equal(alone[1], weights(0, seed=2)[1])


def test_two_models_differ_and_a_copy_does_not() -> None:
    torch.manual_seed(0)
    with nbtrain.empty():
        one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    same = copy.deepcopy(one)
    assert not torch.equal(filled(one).weight, filled(two).weight)
    assert torch.equal(one.weight, filled(same).weight)


class Styled(nn.Module):
    """As transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.scale = nn.Parameter(torch.empty(8))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(0.02)
        if isinstance(module, Styled):
            module.scale.data.fill_(3)


class Whole(nn.Module):
    """As those that fill all their parts at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for p in self.parameters():
            nn.init.constant_(p, 7)


def test_rules_that_a_model_has_for_its_parts() -> None:
    model = filled(nbtrain.empty(Styled))
    assert all((layer.weight == 0.02).all() and layer.bias.any() for layer in model.layers)
    assert (model.scale == 3).all()
    assert all((p == 7).all() for p in filled(nbtrain.empty(Whole)).parameters())


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(3))
        nn.init.normal_(self.table)


class Half(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.other)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.empty(3), persistent=False)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(2, 2), nn.Parameter(torch.empty(2, 2))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.own.copy_(self.inner.weight)


@pytest.mark.parametrize(
    ("cls", "says"),
    [
        (
            Silent,
            r"0 \(Silent\) was made without content, and nothing says how its table begins: give Silent a reset_pa",
        ),
        (Half, r"how its table begins: give Half a reset_parameters\(\) that fills table"),
        (Buffered, r"how its steps begins: give Buffered a reset_buffers\(\)"),
        (Reading, r"reset_parameters\(\) of Reading cannot fill it: .*one module is filled at a time"),
    ],
)
def test_what_nobody_fills_is_named(cls: type[nn.Module], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        filled(nn.Sequential(nbtrain.empty(cls)))


def test_a_buffer_is_filled_by_its_own_method() -> None:
    class Table(Buffered):
        def reset_buffers(self) -> None:
            self.steps.copy_(torch.arange(3))

    assert filled(nbtrain.empty(Table)).steps.tolist() == [0, 1, 2]


class Bytes(TorchDispatchMode):
    """The most that was there at a time, of what was made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) in (torch.Tensor, nn.Parameter) and result.device == CPU:
            storage = result.untyped_storage()
            self.alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return result


def layers() -> nn.Module:
    torch.manual_seed(1)
    return nbtrain.empty(lambda: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8))))


def strategy(rank: int, name: str, options: dict[str, Any], precision: str) -> Strategy:
    kind: Any = registry.find_strategy(name).load()
    made = kind(kind.Options(**options))
    return LowPrecisionStrategy(made, LowPrecisionWeights(torch.bfloat16, rank)) if precision == "bf16-true" else made


def divided(rank: int, name: str, options: dict[str, Any], precision: str) -> tuple[int, list[tuple[Any, Any]]]:
    model = layers()
    optimizer, held = torch.optim.AdamW(model.parameters()), list(model.parameters())
    components = Components(strategy(rank, name, options, precision), CPU, 2)
    with Bytes() as count:
        components.prepare({"model": model, "held": held, "optimizer": optimizer})
    assert all(p is q for p, q in zip(model.parameters(), optimizer.param_groups[0]["params"], strict=True))
    pieces = [(list(piece.ranges()), list(piece.read())) for _, piece in components.pieces()]
    components.forget(whole=False)
    return count.most, pieces


@pytest.mark.parametrize(
    ("name", "options", "precision", "copies"),
    [
        ("fsdp", {}, "32", 1),
        ("fsdp", {}, "bf16-true", 0.5),
        # what the model computes with, what the optimizer steps, gradients
        ("deepspeed", {"stage": 3, "reduce_bucket_size": 2}, "32", 3),
    ],
)
def test_a_rank_has_its_pieces_and_one_module_at_a_time(
    name: str, options: dict[str, Any], precision: str, copies: float
) -> None:
    if name == "deepspeed" and find_spec(name) is None:
        absent("DeepSpeed is not installed", "pip install deepspeed")
    whole = [p.detach().reshape(-1) for p in filled(layers()).parameters()]
    module, everything = 4 * (64 * 64 + 64), sum(flat.nbytes for flat in whole)
    if precision == "bf16-true":
        whole, module = [flat.bfloat16().float() for flat in whole], module * 1.5  # one copy is cast into the other
    for most, pieces in run_on_ranks(divided, name, options, precision):
        assert most <= copies * everything / 2 + module + 18_000  # with two states of a random stream
        for flat, (ranges, parts) in zip(whole, pieces, strict=True):
            assert sum(stop - start for start, stop in ranges) < flat.numel()
            for (start, stop), kept in zip(ranges, parts, strict=True):
                assert torch.equal(flat[start:stop], kept)
