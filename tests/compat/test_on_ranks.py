"""What nbtrain/compat relies on where there are several ranks: DTensor, process groups, FSDP2's nodes in a graph."""

from __future__ import annotations

import datetime
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from nbtrain.compat import autograd_engine, dtensor, groups
from tests.support.ranks import on_ranks, run_on_ranks
from tests.support.wrapped import wrapped

pytestmark = pytest.mark.thorough


@on_ranks
def test_a_ranks_part(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    part = dtensor.local(whole)
    assert type(part) is torch.Tensor
    assert part.tolist() == [[0.0, 1.0], [2.0, 3.0]][rank]
    assert getattr(whole, dtensor.LOCAL) is part


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
