"""`pipeline` cuts a batch only where what comes of the parts is what comes of the whole; the comparison leaves nothing
behind."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.base import Component
from nbtrain.strategies.pipeline import Pipeline
from tests.support.ranks import run_on_ranks


class Recurrent(nn.Module):
    """(time, batch, features), as nn.LSTM has it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)[0]
        return found


class Blocks(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.between = between
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.between(block(x))
        return x


class Whole(nn.Module):
    """Takes batches of one size only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(8, 6) * 2


class Drawn(Blocks):
    """Also when it is evaluated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn_like(x)


class Deaf(nn.Module):
    """Cannot be evaluated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise RuntimeError("only to be trained")
        return x


def encoder(batch_first: bool) -> nn.Module:
    layers = [nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=batch_first) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 6), *layers, nn.Linear(6, 6))


def centred(h: torch.Tensor) -> torch.Tensor:
    return h - h.mean(0)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "layers with the batch second": (lambda: encoder(False), (8, 4, 6), False),
    "layers with the batch first": (lambda: encoder(True), (8, 4, 6), True),
    "an LSTM with the batch second": (lambda: nn.Sequential(Recurrent(), Recurrent()), (8, 4, 6), False),
    "samples that see each other": (lambda: Blocks(centred), (8, 6), False),
    "samples that do not": (Blocks, (8, 6), True),
    "one size of batches": (lambda: nn.Sequential(Whole(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), (8, 6), False),
}
"""with the shape of a batch, and whether it can be cut"""
EVALUATED = "samples that see each other"


def far(ours: nn.Module, theirs: nn.Module) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def staged(model: nn.Module, **options: Any) -> Any:
    prepared = Pipeline(Pipeline.Options(**options)).set_up(Component({"model": model}))
    prepared.enter()
    return prepared


def _trained(rank: int, name: str, evaluates: bool) -> tuple[float, list[bool], list[str]]:
    make, shape, _ = MODELS[name]

    def loop(model: nn.Module, around: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        draw = torch.Generator().manual_seed(1)
        found = []
        if evaluates:
            with torch.no_grad():
                found.append(model.eval()(torch.randn(shape, generator=draw)).norm().item())
            model.train()
        for _ in range(2):
            loss = (model(torch.randn(shape, generator=draw)) - torch.randn(shape, generator=draw)).square().mean()
            with around():
                loss.backward()
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return found

    torch.manual_seed(0)
    alone = make()
    expected = loop(alone, contextlib.nullcontext)
    torch.manual_seed(0)
    model = make()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        prepared = staged(model, microbatches=4)
        found = loop(model, prepared.backward)
        prepared.leave()
    prepared.close()
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    uncut = [str(one.message) for one in said if "uncut" in str(one.message)]
    return max(apart, far(model, alone)), list(prepared.calls[0].known.values()), uncut


@pytest.mark.parametrize(("name", "evaluates"), [*((name, False) for name in MODELS), (EVALUATED, True)])
def test_a_batch_is_cut_only_where_that_is_right(name: str, evaluates: bool) -> None:
    cut = MODELS[name][2]
    found = run_on_ranks(_trained, name, evaluates)
    for apart, known, _ in found:
        assert apart < 1e-5
        assert known == [cut]
    assert len(found[0][2]) == (not cut)
    assert cut or "batch_first" in found[0][2][0]


class Counting(nn.Module):
    """Draws and normalises; where it is evaluated, it counts and collects."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.calls, self.seen = 0, [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.calls += 1
            self.seen.append(len(x))
            self.steps.add_(1)
        return self.drop(self.norm(self.linear(x))) * random.uniform(0.99, 1) + 0.1 * torch.rand_like(x)


def _left(rank: int, known: bool) -> tuple[bool, list[Any]]:
    """What a cell leaves, with and without a comparison in it."""
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), Counting())
    x = torch.randn(8, 6)
    prepared = staged(model, microbatches=2)
    calls = prepared.calls[0]
    if known:
        first = staged(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
        first.calls[0].staged.root(x)
        calls.known.update(first.calls[0].known)
        first.leave()
        prepared.enter()
    compared = not calls.known
    torch.manual_seed(1)
    random.seed(1)
    prepared.place.random_state.begin()
    with prepared.backward():
        model(x).square().mean().backward()
    prepared.leave()
    mine = model[rank]
    found: list[Any] = [
        *(b.tolist() for b in mine.buffers()),
        *(p.grad.tolist() for p in mine.parameters()),
        mine.calls,
        list(mine.seen),
        [m.training for m in model.modules()],
        torch.get_rng_state().tolist(),
        [state.tolist() for state in prepared.place.random_state.states],
        random.getstate(),
        prepared.place.inside,
    ]
    prepared.close()
    return compared and bool(calls.known), found


def test_nothing_is_left_of_the_comparison() -> None:
    with_it, without = run_on_ranks(_left, False), run_on_ranks(_left, True)
    for (compared, found), (also, expected) in zip(with_it, without, strict=True):
        assert (compared, also) == (True, False)
        assert found == expected


def _known(rank: int, name: str) -> dict[Any, bool]:
    model = {
        "drawn": Drawn(),
        "deaf": nn.Sequential(nn.Linear(6, 6), Deaf(), nn.Linear(6, 6)),
        "autocast": Blocks(),
        "centred under autocast": Blocks(centred),
    }[name]
    prepared = staged(model)
    with torch.autocast("cpu", enabled="autocast" in name), prepared.backward():
        model(torch.randn(16, 6)).float().sum().backward()
    mine = [p for p in model.parameters() if not prepared.stage_parameters.foreign(p)]
    assert all(p.grad is not None for p in mine)  # autocast has kept no weight that the comparison made
    model(torch.randn(1, 6))
    prepared.leave()
    prepared.close()
    known: dict[Any, bool] = prepared.calls[0].known
    return known


@pytest.mark.filterwarnings("ignore:pipeline. ")
@pytest.mark.parametrize("name", ["drawn", "deaf", "autocast", "centred under autocast"])
def test_what_cannot_be_compared_is_cut(name: str) -> None:
    for known in run_on_ranks(_known, name):
        assert list(known.values()) == [name != "centred under autocast"]


class Keeping(nn.Module):
    """A layer that puts what it computes into an object of its caller's, as transformers' do into a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, cache: SimpleNamespace) -> torch.Tensor:
        found = self.line(x)
        if cache.on:
            cache.layers.append(SimpleNamespace(values=found))
        return found


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Keeping() for _ in range(3))

    def forward(self, x: torch.Tensor, use_cache: bool = True) -> torch.Tensor:
        cache = SimpleNamespace(on=use_cache, layers=[])
        for block in self.blocks:
            x = block(x, cache)
        return x


def _tensors_kept_by_an_object(rank: int) -> str:
    torch.manual_seed(0)
    model = WithCache()
    x = torch.randn(8, 6)
    expected = model(x)
    prepared = staged(model, microbatches=2)
    try:
        with pytest.raises(NotSupported, match="use_cache=False") as error:
            model(x)
        assert torch.allclose(model(x, use_cache=False), expected, atol=1e-6)
    finally:
        prepared.leave()
    prepared.close()
    return str(error.value)


def test_parts_that_keep_tensors_in_an_object_are_refused() -> None:
    """The record would have kept tensors without numbers in it, and a stage would have sent them: a hang."""
    first, last = run_on_ranks(_tensors_kept_by_an_object)
    assert first == last
    assert "Keeping puts tensors into a SimpleNamespace" in first
