"""reduce and gather where several ranks see the same batches: one of them speaks for all."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.strategies.base import Strategy, share_of
from nbtrain.worker.ranks.collectives import Speakers
from tests.support.bench import rank_info
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.filterwarnings("error")


def strategy(name: str, rank: int, world: int, nodes: int) -> Strategy:
    found = registry.make_strategy(name, {}, {})
    found.place = rank_info(rank, world, local_rank=rank % (world // nodes), nodes=nodes)
    return found


def _says(rank: int, name: str, world: int, nodes: int) -> tuple[dict[str, Any], list[int]]:
    """As a cell would, where ranks of one share have one number."""
    kind = strategy(name, rank, world, nodes)
    index, count = share_of(kind, rank, world)
    speakers = Speakers(kind, rank, world)
    says = speakers.names()
    reduce, gather = says["reduce"], says["gather"]
    n = index + 2
    found: dict[str, Any] = {}
    for op in ("mean", "sum", "min", "max"):
        found[f"int {op}"] = reduce(n, op)
        found[f"float {op}"] = reduce(n / 2, op)
        found[f"bool {op}"] = float(reduce(torch.tensor([index == 0, True]), op)[0])
        found[f"tensor {op}"] = reduce(torch.full((2, 3), n, dtype=torch.bfloat16, requires_grad=True) * 1.0, op)
        found[f"count {op}"] = reduce(torch.tensor(n), op)
    found["inf"] = reduce(math.inf, "sum"), float(reduce(torch.tensor(math.inf), "sum"))
    found["gather"] = gather(n)
    found["tensors"] = [len(part) for part in gather(torch.arange(n))]
    found["objects"] = gather({"of": index})
    found["same"] = all(
        torch.equal(part, torch.full((2,), i)) for i, part in enumerate(gather(torch.full((2,), index)))
    )
    for wrong in (None, "text", [1]):
        with pytest.raises(UsageError, match="takes numbers and tensors"):
            reduce(wrong, "sum")
    with pytest.raises(UsageError, match="there are mean, sum"):
        reduce(1, "product")
    return found, list(range(count))


CASES = [("ddp2", 2, 1), ("ddp2", 4, 2), ("ddp2", 2, 2), ("pipeline", 2, 1), ("ddp", 2, 1), ("ddp2", 3, 2)]


@pytest.mark.parametrize(("name", "world", "nodes"), CASES)
def test_each_share_counts_once(name: str, world: int, nodes: int) -> None:
    for found, shares in run_on_ranks(_says, name, world, nodes, world_size=world):
        numbers = [i + 2 for i in shares]
        wanted = {"mean": sum(numbers) / len(numbers), "sum": sum(numbers), "min": min(numbers), "max": max(numbers)}
        for op, value in wanted.items():
            assert found[f"int {op}"] == pytest.approx(value)
            assert isinstance(found[f"int {op}"], float if op == "mean" else int)
            assert found[f"float {op}"] == pytest.approx(value / 2)
            assert found[f"tensor {op}"].dtype == torch.bfloat16
            assert not found[f"tensor {op}"].requires_grad
            assert torch.allclose(found[f"tensor {op}"].float(), torch.full((2, 3), float(value)), rtol=1e-2)
            assert float(found[f"count {op}"]) == pytest.approx(value)
            assert found[f"count {op}"].dtype == (torch.float32 if op == "mean" else torch.int64)
        firsts = [i == 0 for i in shares]
        assert found["bool sum"] == 1
        assert found["bool mean"] == pytest.approx(sum(firsts) / len(firsts))
        assert (found["bool min"], found["bool max"]) == (min(firsts), max(firsts))
        assert found["inf"] == (math.inf, math.inf)
        assert (found["gather"], found["tensors"]) == (numbers, numbers)
        assert found["objects"] == [{"of": i} for i in shares]
        assert found["same"]


def _differs(rank: int) -> tuple[list[Any], list[str]]:
    """What a loop has dealt out by rank, and not the strategy."""
    speakers = Speakers(strategy("ddp2", rank, 2, 1), rank, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values = [speakers.reduce(3.0 + rank, "sum"), speakers.reduce(torch.tensor([rank, 1 - rank]), "sum").tolist()]
        values += [speakers.gather([rank]), speakers.gather(torch.zeros(rank + 1)), speakers.gather(rank)]
        values += [speakers.reduce(3.0 + rank), speakers.reduce(rank, "max")]  # these are over all: nothing to be said
    return values, [f"{one.filename.endswith('test_collectives.py')} {one.message}" for one in caught]


def test_what_is_left_out_is_said() -> None:
    for values, said in run_on_ranks(_differs):
        assert values == [3.0, [0, 1], [[0]], [torch.zeros(1)], [0], 3.5, 1]
        assert [one.split(":")[0] for one in said] == ['True reduce(value, "sum")', "True gather(value)"]
        assert "reduce(value) * world_size" in said[0]
        assert "all_gather_object" in said[1]
