"""What nbtrain/compat relies on where there are several ranks: DTensor, process groups, FSDP2's nodes in a graph."""

from __future__ import annotations

import datetime
import socket
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nbtrain.compat import autograd_engine, dtensor, groups
from tests.support.ranks import on_ranks, run_on_ranks
from tests.support.wrapped import wrapped

pytestmark = pytest.mark.thorough


@on_ranks
def test_a_ranks_part_and_who_moves_rows(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    part = dtensor.local(whole)
    assert type(part) is torch.Tensor
    assert part.tolist() == [[0.0, 1.0], [2.0, 3.0]][rank]
    assert getattr(whole, dtensor.LOCAL) is part
    moves: list[str] = []

    def count(path: str) -> Any:
        def wrap(old: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                moves.append(path)
                return old(*args, **kwargs)

            return call

        return wrap

    ways = [
        path for path in dtensor.MOVERS if hasattr(sys.modules.get(path.rpartition(".")[0]), path.rpartition(".")[2])
    ]
    assert ways
    with wrapped({path: count(path) for path in ways}):
        assert whole.redistribute(mesh, [Replicate()]).to_local().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len(moves) == 1, moves


def _numbers(rank: int) -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.tensor([1.0, 2.0]), mesh, [Shard(0)])
    asked: list[int] = []

    def complete(tensor: Any) -> torch.Tensor:
        asked.append(1)
        whole: torch.Tensor = tensor.full_tensor()
        return whole.sum()

    handle = dtensor.read_numbers_by(complete)
    assert dtensor.read_numbers_by(complete) is None  # somebody else's stays
    # A rank alone has one number; what was asked for is the sum over both.
    one = DTensor.from_local(torch.full((), float(rank + 1)), mesh, [Replicate()], run_check=False)
    found = [sharded.sum().item(), float(one)]
    handle.remove()
    assert len(asked) == 2
    again = dtensor.read_numbers_by(complete)
    again.remove()
    return found


def test_numbers_are_read_by_another_function() -> None:
    assert run_on_ranks(_numbers) == [[3.0, 1.0], [3.0, 2.0]]


def _computed(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    handlers = DTensor._op_dispatcher._custom_op_handlers  # type: ignore[attr-defined]
    before = dict(handlers)
    asked: list[Any] = []

    def compute(op: Any, args: Any, kwargs: Any) -> Any:
        asked.append(dtensor.written(op, args, kwargs))
        return dtensor.plainly(op, args, kwargs)

    handle = dtensor.compute_by(("mul_", "no_such_operation", "neg"), compute)
    second = dtensor.compute_by(("mul_",), lambda *_: None)  # who comes second changes nothing
    second.remove()
    sharded.mul_(2)
    assert asked == [[sharded]]
    assert (-sharded).full_tensor().tolist() == [0.0, -2.0, -4.0, -6.0]
    assert asked[1:] == [[]], "nothing is written to"
    handle.remove()
    sharded.mul_(1)
    assert len(asked) == 2
    assert handlers == before
    return sharded.full_tensor().tolist()  # type: ignore[no-any-return]


def test_operations_are_computed_in_another_way() -> None:
    assert run_on_ranks(_computed) == [[0.0, 2.0, 4.0, 6.0]] * 2


@pytest.mark.parametrize("name", [*dtensor.RANDOM, *dtensor.NEW, *dtensor.ROWS, *dtensor.WITHOUT_RULE])
def test_operations_are_there_under_their_names(name: str) -> None:
    packet, _, overload = name.partition(".")
    assert not overload or overload in getattr(torch.ops.aten, packet).overloads()
    assert hasattr(torch.ops.aten, packet)


def test_names_of_operations_that_write() -> None:
    names = dtensor.writing_operations()
    assert {"mul_", "copy_", "zero_", "normal_"} <= set(names)
    assert not {"mul", "__init__", "_foreach_mul_"} & set(names)


def _nodes(rank: int) -> tuple[bool, bool]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def gathers(model: nn.Module) -> bool:
        out = model(torch.ones(1, 2, requires_grad=True)).sum()  # keeps the graph
        found, todo = False, [out.grad_fn]
        while todo:
            node = todo.pop()
            if node is not None:
                found = found or autograd_engine.is_unit_gatherer(node)
                todo += [after for after, _ in node.next_functions]
        return found

    return gathers(model), gathers(nn.Linear(2, 2))


def test_nodes_that_gather_a_unit_are_known() -> None:
    assert run_on_ranks(_nodes) == [(True, False)] * 2


def _groups(rank: int) -> int:
    made: list[str] = []

    def wrap(old: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            made.append("group")
            return old(*args, **kwargs)

        return call

    with wrapped({groups.MAKE: wrap}):
        dist.new_group([0, 1])
        init_device_mesh("cpu", (2, 1))
    return len(made)


def test_every_group_is_made_in_one_place() -> None:
    assert all(count >= 2 for count in run_on_ranks(_groups))


def _ended(rank: int) -> bool:
    """gloo knows of no abort, and torch's call forgets its groups all the same."""
    dist.barrier()
    groups.abort()
    ended = not dist.is_initialized()
    if ended:  # who has forked this ends a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ended


def test_groups_are_ended() -> None:
    assert run_on_ranks(_ended) == [True, True]


def _met(rank: int) -> tuple[bool, bool, float]:
    with socket.socket() as free:
        free.bind(("", 0))
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    first, second = (groups.meet(url, 0, 1, datetime.timedelta(seconds=20), f"group {n}") for n in range(2))
    first.set("0", "an address")
    return first.check(["0"]), second.check(["0"]), second.timeout.total_seconds()


def test_a_store_that_goes_on_has_nothing_under_the_names_of_the_next_group() -> None:
    assert run_on_ranks(_met) == [(True, False, 20.0)] * 2
