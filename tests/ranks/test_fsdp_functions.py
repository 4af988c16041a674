"""Every function of torch that takes a tensor: of tensors in pieces it gives what it gives in one process, or one
sentence."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.support.fsdp import Stage
from tests.support.ranks import run_on_ranks
from tests.support.torch_functions import compared, played, tried


def on_a_rank(rank: int, calls: list[tuple[str, str]], sharded: bool = True) -> list[Any]:
    prepared = Stage(sharded).set_up([nn.Linear(5, 7), nn.Linear(5, 7)])
    prepared.enter()
    modules = prepared.component.modules.values()
    answers = played([p for module in modules for p in module.parameters() if p.ndim > 1], calls)
    prepared.leave()
    return answers


def what_works(rank: int, calls: list[tuple[str, str]]) -> list[Any]:
    return [answer if isinstance(answer, list) else None for answer in on_a_rank(rank, calls, False)]


@pytest.mark.thorough
@pytest.mark.limit(600)
@pytest.mark.parametrize("count", [2, 4])
def test_functions_give_what_they_give_in_one_process(count: int) -> None:
    calls = tried()
    (wanted,) = run_on_ranks(what_works, calls, world_size=1, timeout=120)
    pairs = [(call, want) for call, want in zip(calls, wanted, strict=True) if want is not None]
    assert len(pairs) > 1500
    works = [call for call, _ in pairs]
    answers = run_on_ranks(on_a_rank, works, world_size=count, timeout=450)
    apart, refused = compared(works, [want for _, want in pairs], answers)
    assert not apart, "\n".join(apart[:40])
    assert len(refused) < 30, sorted(refused)
