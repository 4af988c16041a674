"""What strategies say they will hold, beside what ranks are found to hold: each strategy with each model of `planned`.

A rank's memory is what the system counts of it (on a CPU: its own pages), less what the same rank has when a tiny model
has been trained in the same way: interpreter, libraries, sockets. Blocks are had from the system one by one while that
is measured, for what the C library keeps for later would be counted, too. Two numbers are taken: what is there when a
step has ended and gradients are still there; and the most there was during a step, with few samples and with many, so
that the difference of the two is activations and nothing else.

Who adds a strategy adds a row to `ROWS`.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from benchmarks.measure import run, say
from benchmarks.tables_cells import MEMORY
from nbtrain.annexes.planning.profile.profile import profile
from nbtrain.base import humanize
from nbtrain.machine import registry
from nbtrain.strategies.memory_estimate import Estimate, Profile, World
from tests.support.kernels import Kernel, running_kernel
from tests.support.planned import PLANNED

RANKS = 2


class Size(NamedTuple):
    """Of what is measured of a model."""

    size: int
    few: int
    many: int
    """samples, of each rank"""


SIZES = {"transformer": Size(224, 10, 20), "resnet": Size(80, 8, 16), "mlp": Size(896, 2048, 4096)}
TINY = Size(8, 4, 8)
FIRST = Size(80, 4, 8)
"""Of the convolutional net, before anything of a strategy is measured."""
WEIGHTS = Size(1400, 16, 32)
"""Of the perceptron: gradients are all there is of a backward."""


@dataclass(frozen=True, slots=True)
class Row:
    """A strategy with some of its options."""

    strategy: str
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "32"

    @property
    def line(self) -> str:
        return " ".join(
            filter(None, [f"-s {self.strategy}", humanize.flags(self.options), f"--precision {self.precision}"])
        )

    @property
    def playable(self) -> bool:
        return all(find_spec(package) for package in registry.strategy(self.strategy).needs.packages)

    @property
    def world(self) -> World:
        if self.strategy == "single":
            return World(ranks=1, precision=self.precision)
        if registry.strategy(self.strategy).needs.together:
            return World(ranks=1, devices=RANKS, precision=self.precision)
        return World(ranks=RANKS, precision=self.precision)

    def estimate(self, of: Profile) -> Estimate:
        cls = registry.strategy(self.strategy).load()
        found = cls(cls.Options(**self.options)).estimate(of, self.world)
        assert found is not None, f"{self.strategy} does not know"
        return found

    def __str__(self) -> str:
        more = humanize.flags(self.options).replace("--", "").replace(" ", "-")
        return "-".join(filter(None, [self.strategy, more, "" if self.precision == "32" else self.precision]))


ROWS = (
    Row("single"),
    Row("dp"),
    Row("ddp"),
    Row("ddp", {"bucket_mb": 1, "comm_dtype": "bf16"}),
    Row("ddp2"),
    Row("zero1"),
    Row("sharded"),
    Row("horovod"),
    Row("fsdp"),
    Row("fsdp", {"sharding": "SHARD_GRAD_OP"}),
    Row("fsdp", {"cpu_offload": True}),
    Row("deepspeed", {"stage": 1}),
    Row("deepspeed", {"stage": 2}),
    Row("deepspeed", {"stage": 3}),
    Row("deepspeed", {"stage": 2, "offload_optimizer": "cpu"}),
    Row("deepspeed", {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
    Row("pipeline"),
)
"""In an order in which ranks can be kept from one to the next."""

NOTHING_KEPT = {"MKL_DISABLE_FAST_MM": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0", "DS_ACCELERATOR": "cpu"}
"""What torch's libraries otherwise keep: buffers for each thread, code for each shape."""

NOTEBOOK = (
    """
import ctypes, gc
import torch
import torch.distributed as dist
from tests.support.planned import PLANNED, loss

def anew(kind, size):
    global model, optimizer
    torch.manual_seed(0)
    model = PLANNED[kind].model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

"""
    + MEMORY
    + """
def step(kind, samples):
    x, y = PLANNED[kind].batch(samples)
    loss(model(x), y).backward()
    optimizer.step()

def most(kind, samples):
    "Bytes of this rank at the most, in a step."
    low_water()
    step(kind, samples)
    optimizer.zero_grad()
    now = pages()
    return now["VmHWM"] - now["RssFile"] - now["RssShmem"]

def weighed(kind, few, many):
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD; slower, and the rank keeps it
    step(kind, few)  # the optimizer's state is made in the first one
    optimizer.zero_grad()
    peaks = [most(kind, samples) for samples in (few, many)]
    step(kind, few)
    kept = low_water()
    optimizer.zero_grad()
    return kept, *peaks
"""
)
ANEW = "anew({kind!r}, {size})"
WEIGHED = "found = on_each_rank(weighed({kind!r}, {few}, {many}))"


class Found(NamedTuple):
    """Bytes of the rank that has the most."""

    kept: int
    few: int
    many: int
    """at the most, in a step with so many samples"""


class Scales:
    """A kernel in which that is measured."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        run(kernel, "%load_ext nbtrain")
        run(kernel, NOTEBOOK)
        self._row: Row | None = None
        self._floors: list[list[int]] = []

    def weigh(self, row: Row, kind: str, size: Size) -> Found:
        if self._row != row:
            if self._row is None or (self._row.strategy, self._row.world) != (row.strategy, row.world):
                self._weigh(row, "resnet", FIRST)  # what there is from the first time on
            self._floors = self._weigh(row, "transformer", TINY)
            self._row = row
        ranks = self._weigh(row, kind, size)
        found = [[n - floor[0] for n in rank] for rank, floor in zip(ranks, self._floors, strict=True)]
        return Found(*map(max, zip(*found, strict=True)))

    def _weigh(self, row: Row, kind: str, size: Size) -> list[list[int]]:
        run(self._kernel, ANEW.format(kind=kind, size=size.size) + "; found = None")
        text = self._cell(row, WEIGHED.format(kind=kind, few=size.few, many=size.many))
        found: list[list[int]] | None = run(self._kernel, say("found"))
        assert found is not None, f"{row}: {text}"
        return found

    def _cell(self, row: Row, text: str) -> str:
        """What it has shown."""
        devices = max(row.world.ranks, row.world.devices)
        shown = self._kernel.run(f"%%distributed {row.line} --devices {devices} --monitor off\n{text}", timeout=240)
        assert shown.error is None, shown.text
        return shown.text


@contextmanager
def scales() -> Iterator[Scales]:
    """With a directory of its own for what a pool keeps there, as `kernel_of` has it."""
    with tempfile.TemporaryDirectory() as folder, running_kernel(XDG_RUNTIME_DIR=folder, **NOTHING_KEPT) as found:
        yield Scales(found)


@functools.cache
def profiled(kind: str, size: Size, precision: str) -> tuple[Profile, Profile]:
    """With few samples, and with many."""
    model = PLANNED[kind].model(size.size)
    optimizer = torch.optim.AdamW(model.parameters())
    few, many = (PLANNED[kind].batch(samples) for samples in (size.few, size.many))
    return profile(model, few, optimizer, precision=precision), profile(model, many, optimizer, precision=precision)


def estimated(row: Row, kind: str, size: Size) -> tuple[Estimate, Estimate]:
    few, many = profiled(kind, size, row.precision)
    return row.estimate(few), row.estimate(many)


@dataclass(frozen=True, slots=True)
class Compared:
    """What was measured, for one that was estimated."""

    kept: float
    activations: float
    """more of them with many samples than with few"""
    peak: float
    """with many samples"""
    said: str
    """all of it in megabytes, measured and estimated"""


def compared(scales: Scales, row: Row, kind: str, size: Size | None = None) -> Compared:
    size = size or SIZES[kind]
    few, many = estimated(row, kind, size)
    found = scales.weigh(row, kind, size)
    pairs = {
        "kept": (found.kept, few.kept),
        "activations": (found.many - found.few, many.activations - few.activations),
        "peak": (found.many, many.peak),
    }
    said = "  ".join(f"{name} {a / 1e6:6.1f} of {b / 1e6:6.1f} MB" for name, (a, b) in pairs.items())
    return Compared(**{name: a / b for name, (a, b) in pairs.items()}, said=f"{row!s:28} {kind:12} {said}")


def main() -> None:
    with scales() as found:
        for row in ROWS:
            for kind in SIZES if row.playable else ():
                one = compared(found, row, kind)
                print(f"{one.said}   {one.kept:.2f} {one.activations:.2f} {one.peak:.2f}", flush=True)


if __name__ == "__main__":
    main()
