"""What a forward keeps in its module, and hooks and forwards that the cut has to see: right, or one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.base import Component
from nbtrain.strategies.pipeline import Pipeline
from tests.support.ranks import run_on_ranks


class Keeps(nn.Module):
    def __init__(self, keep: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.line, self.keep = nn.Linear(6, 6), keep
        self.calls, self.seen, self.last, self.longest = 0, [0], None, 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.line(x)
        self.keep(self, found)
        return found


def counts(part: Any, h: torch.Tensor) -> None:
    part.calls += 1


def collects(part: Any, h: torch.Tensor) -> None:
    part.seen.append(len(h))


def keeps_an_output(part: Any, h: torch.Tensor) -> None:
    part.last = h


def writes(part: Any, h: torch.Tensor) -> None:
    part.mean.lerp_(h.detach().mean(), 0.1)


def replaces(part: Any, h: torch.Tensor) -> None:
    part.mean = part.mean * 0.9 + h.detach().mean() * 0.1


def caches(part: Any, h: torch.Tensor) -> None:
    if part.last is None:
        part.last, part.longest = torch.ones(6), 6


REFUSED = {
    counts: "sets self.calls",
    collects: "sets self.seen",
    keeps_an_output: "`model.last = ",
    writes: "write --microbatches 1",
    replaces: "sets self.mean",
    caches: "",
}


def staged(model: nn.Module, microbatches: int = 4) -> Any:
    prepared = Pipeline(Pipeline.Options(microbatches=microbatches)).set_up(Component({"model": model}))
    prepared.enter()
    return prepared


def _kept(rank: int) -> list[str]:
    said = []
    for keep in REFUSED:
        prepared = staged(model := nn.Sequential(Keeps(keep), nn.Tanh(), Keeps(keep), nn.Linear(6, 3)))
        try:
            model(torch.randn(8, 6))
            said.append("")
        except NotSupported as error:
            said.append(str(error))
        prepared.leave()
        prepared.close()
    return said


def test_what_a_part_keeps_for_each_micro_batch_is_one_sentence() -> None:
    first, second = run_on_ranks(_kept)
    assert first == second
    for sentence, words in zip(first, REFUSED.values(), strict=True):
        assert words in sentence
        assert bool(words) == bool(sentence)


class Counts(nn.Module):
    """In a forward that is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.blocks = 0, nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.blocks[1](self.blocks[0](x))  # type: ignore[no-any-return]


def _counted(rank: int) -> int:
    prepared = staged(model := Counts())
    with pytest.raises(NotSupported, match=r"in the loop, below the call: `model\.calls = "):
        model(torch.randn(8, 6))
    prepared.leave()
    prepared.close()
    return model.calls


def test_a_divided_forward_that_counts_is_told_where_to_count() -> None:
    assert run_on_ranks(_counted) == [0, 0]


def chain() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 3))


def halves(module: nn.Module, given: Any, returned: torch.Tensor) -> torch.Tensor | None:
    return returned * 0.5 if isinstance(module, nn.Sequential) and len(module) == 2 else None


def _seen(rank: int, how: str) -> float:
    x, model = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), chain()
    handle = None
    if how == "a forward of its own":
        model[1].forward = lambda h: nn.Sequential.forward(model[1], h) * 0.5
    elif how == "a hook of torch's":
        halves.__module__ = "torch.somewhere"
        model[1].register_forward_hook(halves)
    alone = copy.deepcopy(model)
    if how == "a forward of its own":
        alone[1].forward = lambda h: nn.Sequential.forward(alone[1], h) * 0.5
    elif how == "a hook for all modules":
        handle = register_module_forward_hook(halves)  # type: ignore[arg-type]
    expected = alone(x).detach()
    prepared = staged(model)
    found = model(x).detach()
    prepared.leave()
    prepared.close()
    if handle is not None:
        handle.remove()
    return float((found - expected).abs().max())


@pytest.mark.parametrize("how", ["a forward of its own", "a hook of torch's", "a hook for all modules"])
def test_a_sequential_that_the_cut_would_take_apart_does_what_it_does(how: str) -> None:
    assert max(run_on_ranks(_seen, how)) < 1e-6
