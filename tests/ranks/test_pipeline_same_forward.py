"""What a forward reads besides its inputs may change from call to call, and gradients may be there meanwhile."""

from __future__ import annotations

import contextlib
import copy
import enum
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.base import Component
from nbtrain.strategies.pipeline import Pipeline
from tests.support.ranks import run_on_ranks

ALPHA: Any = 1.0
CONFIG = types.SimpleNamespace(deep={"alpha": 1.0})


class Kind(enum.Enum):
    PLUS = 1
    MINUS = 2


def scale() -> float:
    return ALPHA  # type: ignore[no-any-return]


class Reads(nn.Module):
    """`how` says where it finds its number."""

    share: Any = 1.0

    def __init__(self, how: Callable[[Reads], Any]) -> None:
        super().__init__()
        self.how = how
        self.alpha: Any = 1.0
        self.several: Any = [1.0, (2.0, None)]
        self.kind = Kind.PLUS
        self.noise = torch.ones(6)
        self.act: nn.Module = nn.Tanh()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    @property
    def doubled(self) -> Any:
        return 2 * scale()

    def read(self) -> Any:
        return self.how(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.read() * self.act(block(x))
        return x


def _set_global(model: Reads, i: int) -> None:
    global ALPHA
    ALPHA = float(i)


def _set_config(model: Reads, i: int) -> None:
    CONFIG.deep["alpha"] = float(i)


def _set_class(model: Reads, i: int) -> None:
    Reads.share = float(i)


def _set_part(model: Reads, i: int) -> None:
    model.act = nn.ReLU() if i % 2 else nn.Sigmoid()


def _closed() -> tuple[Callable[[Reads], Any], Callable[[Reads, int], None]]:
    held = 1.0

    def put(model: Reads, i: int) -> None:
        nonlocal held
        held = float(i)

    return lambda model: held, put


PLACES: dict[str, tuple[Callable[[Reads], Any], Callable[[Reads, int], None]]] = {
    "an attribute": (lambda m: m.alpha, lambda m, i: setattr(m, "alpha", i)),
    "a list": (lambda m: m.several[1][0], lambda m, i: setattr(m, "several", [1.0, (float(i), None)])),
    "an enum": (
        lambda m: 1 if m.kind is Kind.PLUS else -1,
        lambda m, i: setattr(m, "kind", Kind.MINUS if i % 2 else Kind.PLUS),
    ),
    "a tensor": (lambda m: m.noise, lambda m, i: setattr(m, "noise", torch.full((6,), float(i)))),
    "a global": (lambda m: ALPHA, _set_global),
    "a global of a function that a property calls": (lambda m: m.doubled, _set_global),
    "an object": (lambda m: CONFIG.deep["alpha"], _set_config),
    "a closure": _closed(),
    "the class": (lambda m: m.share, _set_class),
    "a function": (lambda m: 1.0, lambda m, i: setattr(m, "how", lambda m: i)),
    "another layer": (lambda m: 1.0, _set_part),
}


def train(
    model: Any, change: Callable[[Any, int], None], around: Any, sizes: tuple[int, ...], late: bool
) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    found = []
    for i, size in enumerate(sizes):
        change(model, i % 3)
        loss = F.mse_loss(model(torch.randn(size, 6, generator=draw)), torch.ones(size, 6))
        if late:
            optimizer.zero_grad()
        with around():
            loss.backward()
        found.append(loss.item())
        optimizer.step()
        if not late:
            optimizer.zero_grad()
    return found


def _compared(rank: int, make: Callable[[], nn.Module], change: Any, sizes: tuple[int, ...], late: bool) -> float:
    torch.manual_seed(0)
    expected = train(make(), change, contextlib.nullcontext, sizes, late)
    torch.manual_seed(0)
    model = make()
    prepared = Pipeline(Pipeline.Options(microbatches=2)).set_up(Component({"model": model}))
    prepared.enter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(model, change, prepared.backward, sizes, late)
    prepared.leave()
    prepared.close()
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def _all_places(rank: int) -> dict[str, float]:
    return {
        place: _compared(rank, lambda how=how: Reads(how), change, (4,) * 5, False)  # type: ignore[misc]
        for place, (how, change) in PLACES.items()
    }


@pytest.mark.thorough
def test_what_a_forward_reads_may_change() -> None:
    for found in run_on_ranks(_all_places):
        assert {place: apart for place, apart in found.items() if not apart < 1e-5} == {}


def test_a_smaller_batch_is_written_down_while_gradients_are_held() -> None:
    """Another rank's cannot be read; without a warning."""

    def nothing(model: Any, i: int) -> None:
        """Changes nothing."""

    assert max(run_on_ranks(_compared, lambda: Reads(lambda m: 1.0), nothing, (16, 16, 8), True)) < 1e-5


class Stops(Reads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise ValueError("three")
        return super().forward(x)


def _kept(rank: int) -> tuple[bool, str]:
    model = Stops(lambda m: 1.0)
    prepared = Pipeline(Pipeline.Options(microbatches=1)).set_up(Component({"model": model}))
    prepared.enter()
    with prepared.backward():
        model(torch.ones(4, 6)).sum().backward()
    before = [p.grad for p in model.parameters()]
    said = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model(torch.ones(3, 6))
        except ValueError as error:
            said = str(error)
    same = all(p.grad is grad is not None for p, grad in zip(model.parameters(), before, strict=True))
    prepared.leave()
    prepared.close()
    return same, said


def test_the_same_gradients_are_there_after_a_forward_that_raises() -> None:
    assert run_on_ranks(_kept) == [(True, "three")] * 2


class Collects(Reads):
    """Changes what it reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        global ALPHA
        ALPHA += 1.0
        CONFIG.deep["alpha"] += 1.0
        return x


def _collected(rank: int) -> list[Any]:
    model = Collects(lambda m: 1.0)
    prepared = Pipeline(Pipeline.Options(microbatches=1)).set_up(Component({"model": model}))
    prepared.enter()
    with pytest.raises(NotSupported, match="changes something that it reads"):
        model(torch.ones(4, 6))
    prepared.leave()
    prepared.close()
    return [ALPHA, CONFIG.deep["alpha"]]


def test_a_forward_that_counts_in_a_global_is_refused() -> None:
    assert run_on_ranks(_collected) == [[2.0, 2.0]] * 2


def _drawn(rank: int) -> float:
    model = Reads(lambda m: 1.0)
    alone = copy.deepcopy(model)
    prepared = Pipeline(Pipeline.Options()).set_up(Component({"model": model}))
    prepared.enter()
    for one in (alone, model):
        torch.manual_seed(2)
        for block in one.blocks:
            block.reset_parameters()  # type: ignore[operator]
    prepared.leave()
    prepared.close()
    return max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), alone.parameters(), strict=True))


def test_weights_that_are_drawn_anew_in_a_cell_are_those_of_one_process() -> None:
    assert run_on_ranks(_drawn) == [0.0, 0.0]
