"""What a forward keeps for its next call is real after the model was planned, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import nn

from nbtrain.annexes.planning.profile.profile import profile

pytestmark = pytest.mark.whole_heap

KEPT: dict[str, Any] = {}


class Keeps(nn.Module):
    """Its forward puts what it has made somewhere, where the next call looks for it."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.looks = looks

    def made(self) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x) * self.made()
        return out if not self.looks or out.sum().item() < 1e30 else out * 2


class InDict(Keeps):
    def made(self) -> torch.Tensor:
        if "scale" not in KEPT:
            KEPT["scale"] = torch.ones(8)
        return cast(torch.Tensor, KEPT["scale"])


class InCache(Keeps):
    @staticmethod
    @lru_cache
    def ones(size: int) -> torch.Tensor:
        return torch.ones(size)

    def made(self) -> torch.Tensor:
        return self.ones(8)


class InClass(Keeps):
    seen: ClassVar[list[torch.Tensor]] = []
    size = 8

    def made(self) -> torch.Tensor:
        self.seen.append(torch.ones(self.size))
        return self.seen[0]


class InClosure(Keeps):
    def __init__(self, looks: bool = False) -> None:
        super().__init__(looks)
        ones: torch.Tensor | None = None

        def made() -> torch.Tensor:
            nonlocal ones
            if ones is None:
                ones = torch.ones(8)
            return ones

        self.made = made  # type: ignore[method-assign]


SCALE: torch.Tensor | None = None


class InGlobal(Keeps):
    def made(self) -> torch.Tensor:
        global SCALE
        if SCALE is None:
            SCALE = torch.ones(8)
        return SCALE


class InAttribute(Keeps):
    ones: ClassVar[torch.Tensor | None] = None

    def made(self) -> torch.Tensor:
        if InAttribute.ones is None:
            InAttribute.ones = torch.ones(8)
        return InAttribute.ones


class Weight(Keeps):
    """What it keeps was not made by the forward."""

    def made(self) -> torch.Tensor:
        if "weight" not in KEPT:
            KEPT["weight"] = self.inner.weight.t()[0]
        return cast(torch.Tensor, KEPT["weight"])


PLACES = (InDict, InCache, InClass, InClosure, InGlobal, InAttribute, Weight)


@pytest.mark.sample(first=2)
@pytest.mark.slow
@pytest.mark.parametrize("looks", [False, True], ids=["shapes", "real"])
@pytest.mark.parametrize("kind", PLACES, ids=lambda kind: kind.__name__)
def test_what_a_forward_keeps_elsewhere_is_taken_out_again(kind: type[Keeps], looks: bool) -> None:
    KEPT.clear()
    InCache.ones.cache_clear()
    KEPT["other"] = 1
    model, x = kind(looks), torch.randn(4, 8)
    found = profile(model, x)
    assert "tensors that the forward stored outside of the model were removed again" in found.notes
    assert not any("cannot be removed" in note for note in found.notes)
    out = model(x)
    assert type(out) is torch.Tensor
    expected = model.inner(x) * model.made()
    assert torch.equal(out, expected)
    assert KEPT["other"] == 1


def test_what_cannot_be_taken_out_is_said() -> None:
    def held() -> Iterator[None]:
        yield
        ones = torch.ones(8)
        yield
        del ones

    running = held()
    next(running)

    class Holds(Keeps):
        def made(self) -> torch.Tensor:
            next(running)
            return torch.ones(8)

    found = profile(Holds(), torch.randn(4, 8))
    assert any("cannot be removed" in note for note in found.notes)
