"""`horovod` on two ranks: how it starts and stops, what it sends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.strategies.horovod import Horovod
from nbtrain.worker.runtime import Runtime
from tests.support.absent import absent
from tests.support.bench import Bench, rank_info
from tests.support.ranks import run_on_ranks

SETTINGS = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if find_spec("horovod") is None:
        absent("Horovod is not installed", ".ci/horovod builds it")


class Trainer(Bench):
    """A rank with a model and its optimizer."""

    def __init__(self, rank: int, precision: str = "32", **options: Any) -> None:
        super().__init__(rank, 2, Horovod(**options), precision)
        self.rank = rank
        self.runtime.install()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def train(self, loop: Callable[[], Any], **others: Any) -> list[str]:
        objects = {"model": self.model, "optimizer": self.optimizer, **others}
        return self.cell(loop, split_batches=False, **objects)

    def steps(self, count: int = 3) -> None:
        for i in range(count):
            x, y = batch(i)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x[self.rank :: 2]), y[self.rank :: 2]).backward()
            self.optimizer.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1).clone() for p in self.model.parameters()])


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


def alone(steps: int) -> torch.Tensor:
    """The weights of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for i in range(steps):
        x, y = batch(i % 3)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _two_cells(rank: int) -> tuple[torch.Tensor, list[Any], bool, int, int]:
    import horovod.torch as hvd

    bench = Trainer(rank)
    said: list[Any] = []

    def talk() -> None:
        bench.steps()
        said.append((hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()))
        said.append(hvd.allreduce(torch.tensor([1.0 + rank]), name="mine").item())
        said.append(hvd.allgather(torch.tensor([rank])).tolist())
        said.append(hvd.broadcast_object({"from": rank}, root_rank=0))

    bench.train(talk)
    threads, files = _threads(), len(os.listdir("/proc/self/fd"))
    bench.train(bench.steps)
    left = _more_threads(threads), len(os.listdir("/proc/self/fd")) - files
    assert {k: v for k, v in os.environ.items() if k.startswith("HOROVOD_")} == SETTINGS
    return bench.weights(), said, hvd.is_initialized(), *left


def _without_a_model(rank: int) -> tuple[list[Any], list[bool], int, int]:
    import horovod.torch as hvd

    place = rank_info(rank, 4, local_rank=rank % 2, nodes=2)
    runtime = Runtime(place, Horovod(), lambda step, values: None)
    run = RunSpec(pool=PoolSpec(devices=("cpu",) * 4, nodes=2), strategy="horovod")
    said: list[Any] = []

    def sum_of(value: int, **where: Any) -> int:
        return int(hvd.allreduce(torch.tensor([value]), op=hvd.Sum, name="sum", **where))

    def cell(what: Callable[[], Any]) -> tuple[int, int, bool]:
        runtime.begin(run, {})
        said.append(what())
        dist.barrier()
        runtime.end(True)
        return _threads(), len(os.listdir("/proc/self/fd")), hvd.is_initialized()

    def once_more() -> tuple[int, int]:
        hvd.shutdown()
        hvd.init()
        found = hvd.size(), sum_of(rank)
        hvd.shutdown()
        return found

    def apart() -> int:
        even, odd = hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])
        hvd.init(process_sets=[even, odd])
        return sum_of(rank, process_set=odd if rank % 2 else even)

    def plain() -> tuple[int, ...]:
        hvd.init()
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(), sum_of(1)

    left = [cell(what) for what in (plain, once_more, apart, plain) * 2]
    (threads, files, _), (_, held, _) = left[3], left[-1]
    return said, [up for _, _, up in left], _more_threads(threads), held - files


def test_what_a_cell_without_a_model_does_by_itself_goes_over_all_ranks_and_ends_with_it() -> None:
    for rank, (said, ups, threads, files) in enumerate(run_on_ranks(_without_a_model, world_size=4)):
        plain = (rank, 4, rank % 2, 2, rank // 2, 2, 4)
        assert said == [plain, (4, 6), 4 if rank % 2 else 2, plain] * 2
        assert not any(ups)
        assert threads <= 0
        assert files <= 0


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _more_threads(before: int) -> int:
    """Than there were. One that has been joined is in the table for a moment yet."""
    until = time.monotonic() + 10
    while _threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    return _threads() - before


def test_two_cells_have_the_weights_of_one_process_and_what_is_written_against_horovod_works() -> None:
    ranks = run_on_ranks(_two_cells)
    for rank, (weights, said, up, threads, files) in enumerate(ranks):
        torch.testing.assert_close(weights, alone(6), rtol=1e-5, atol=1e-5)
        assert said == [(rank, 2, rank, 1), 1.5, [0, 1], {"from": 0}]
        assert not up, "between cells its threads would go on talking"
        assert threads <= 0
        assert files == 0
    assert torch.equal(ranks[0][0], ranks[1][0])


def _listeners() -> Iterator[str]:
    """Addresses on which this process listens, as the kernel has them."""
    held = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in held:
                yield address.partition(":")[0]


def _listening(rank: int) -> tuple[list[str], list[str]]:
    from nbtrain.strategies.horovod.session import _rendezvous

    place = rank_info(rank, 2)
    before = list(_listeners())
    with _rendezvous(place):
        meeting = list(_listeners())
    bench, found = Trainer(rank), []
    bench.train(lambda: found.extend(_listeners()))
    assert list(_listeners()) == before
    return [*meeting[len(before) :]], found


def test_nobody_but_this_machine_reaches_it() -> None:
    (server, first), (none, second) = run_on_ranks(_listening)
    assert server == ["0100007F"]
    assert none == []
    assert {*first, *second} == {"0100007F"}


def _gradient(rank: int, dtype: torch.dtype, compression: str) -> torch.Tensor:
    bench = Trainer(rank, compression=compression)
    bench.model = nn.Linear(50, 40).to(dtype)
    bench.optimizer = torch.optim.SGD(bench.model.parameters(), 0.0)
    torch.manual_seed(rank)
    x = torch.randn(4, 50, dtype=dtype)
    bench.train(lambda: bench.model(x).square().mean().backward())
    grad = bench.model.weight.grad
    assert isinstance(grad, torch.Tensor)
    return grad.detach().clone()


def test_compression_sends_16_bits_and_bfloat16_goes_in_32() -> None:
    plain, half = (run_on_ranks(_gradient, torch.float32, how)[0] for how in ("none", "fp16"))
    assert torch.equal(half.half().float(), half)
    assert not torch.equal(plain.half().float(), plain)
    torch.testing.assert_close(half, plain, rtol=1e-2, atol=1e-5)
    one, other = run_on_ranks(_gradient, torch.bfloat16, "none")
    assert one.dtype is torch.bfloat16
    assert torch.equal(one, other)


def _alone(rank: int) -> tuple[str, float, torch.Tensor]:
    """Rank 1 fails; rank 0 waits for it in Horovod."""
    import horovod.torch as hvd

    bench = Trainer(rank)

    def loop() -> None:
        dist.barrier()
        if rank == 1:
            raise ZeroDivisionError
        hvd.allreduce(torch.ones(3), name="alone")

    began, said = time.monotonic(), ""
    try:
        bench.train(loop)
    except (ZeroDivisionError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    bench.train(bench.steps)
    return said, took, bench.weights()


def test_a_rank_that_waits_in_horovod_for_one_that_failed_is_freed_and_goes_on_in_the_next_cell() -> None:
    (waited, took, weights), (failed, _, same) = run_on_ranks(_alone)
    assert failed.startswith("ZeroDivisionError")
    assert waited.startswith("HorovodInternalError")
    assert "shut down" in waited
    assert took < 10
    assert torch.equal(weights, same)
    torch.testing.assert_close(weights, alone(3), rtol=1e-5, atol=1e-5)
