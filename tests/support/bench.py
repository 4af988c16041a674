"""One rank, or the one process that ranks are compared with, inside a test: its runtime, and the cells that it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from nbtrain.base.specs import PoolSpec, RankInfo, RunSpec
from nbtrain.strategies.base import Strategy
from nbtrain.strategies.ddp import DDP
from nbtrain.strategies.single import Single
from nbtrain.worker.random_states.default_generators import capture
from nbtrain.worker.runtime import Runtime
from tests.support.models import samples_of

T = TypeVar("T")


def rank_info(rank: int = 0, world_size: int = 1, **others: Any) -> RankInfo:
    """A rank on a CPU; unless `others` say so, all are in one node."""
    return RankInfo(rank=rank, world_size=world_size, **{"local_rank": rank, "device": "cpu", "threads": 1, **others})


def make_runtime(
    rank: int = 0,
    world_size: int = 1,
    strategy: Strategy | None = None,
    log: Callable[[int, Mapping[str, float]], None] = lambda step, values: None,
    device: str = "cpu",
    precision: str = "32",
) -> Runtime:
    """Of `ddp`, or of `single` where there is one rank, if no strategy is given. It is not installed yet."""
    if strategy is None:
        strategy = DDP(DDP.Options()) if world_size > 1 else Single(Single.Options())
    return Runtime(rank_info(rank, world_size, device=device), strategy, log, precision=precision)


@contextmanager
def running(rank: int, world_size: int, strategy: Strategy | None = None, **options: Any) -> Iterator[Runtime]:
    """A rank in the middle of a cell; torch is as before afterwards."""
    device = options.pop("device", "cpu")
    runtime = make_runtime(rank, world_size, strategy or DDP(DDP.Options()), device=device)
    runtime.install()
    try:
        runtime.randomness.adopt(capture())
        runtime.begin(RunSpec(pool=PoolSpec(devices=("cpu",) * world_size), **options), {})
        yield runtime
    finally:
        runtime.end(True)
        runtime.uninstall()


@contextmanager
def cell_at(place: RankInfo, strategy: Strategy, spec: RunSpec | None = None, **objects: Any) -> Iterator[Runtime]:
    """A cell that uses these objects, on this rank; it may save and load checkpoints."""
    runtime = Runtime(place, strategy, lambda step, values: None)
    runtime.install()
    try:
        runtime.randomness.adopt(capture())
        runtime.begin(spec or RunSpec(pool=PoolSpec()), objects)
        yield runtime
        runtime.end(True)
        runtime.checkpoints.finish()
    finally:
        runtime.uninstall()


def cell(
    rank: int, world_size: int, strategy: Strategy, spec: RunSpec | None = None, **objects: Any
) -> AbstractContextManager[Runtime]:
    return cell_at(rank_info(rank, world_size), strategy, spec, **objects)


class Bench:
    """A rank, or the one process that everything is compared with."""

    def __init__(
        self, rank: int = 0, world_size: int = 1, strategy: Strategy | None = None, precision: str = "32"
    ) -> None:
        self.runtime = make_runtime(rank, world_size, strategy, precision=precision)
        self.world_size = world_size
        self.data = samples_of(24)

    def loader(self, samples: int = 24, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
        return DataLoader(samples_of(samples), batch_size=batch_size, **options)

    def cell(
        self,
        loop: Callable[[], Any],
        accumulate: int = 1,
        split_batches: bool = True,
        scale_lr: str = "",
        **objects: Any,
    ) -> list[str]:
        """The notes of a cell that uses these objects and runs this loop."""
        run = RunSpec(
            pool=PoolSpec(devices=("cpu",) * self.world_size),
            accumulate=accumulate,
            split_batches=split_batches,
            scale_lr=scale_lr,
        )
        notes = self.runtime.begin(run, objects)
        ok = False
        try:
            loop()
            ok = True
        finally:
            notes += self.runtime.end(ok)
        return notes

    def play(self, program: Callable[[Bench], T]) -> T:
        """What the program returns, played on this bench; torch is as before afterwards."""
        self.runtime.install()
        try:
            return program(self)
        finally:
            self.runtime.uninstall()
