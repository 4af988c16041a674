"""What ranks run in a row, whoever started them: they meet, they train, and they tell what they saw in a file."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from benchmarks.peers.models import MODELS, batch_for

UNTIMED = 5
"""first steps of a loop, in which memory is allocated and gradients are put into buckets"""


def tell(file: str, value: Any) -> None:
    """Write a value where `told` finds it: not every package can return one."""
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
    target = Path(f"{file}-{rank}")
    unfinished = target.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(target)


def told(file: str) -> dict[int, Any]:
    """Rank → what it told."""
    found = Path(file).parent.glob(f"{Path(file).name}-*")
    return {int(path.name.rpartition("-")[2]): json.loads(path.read_text()) for path in found if not path.suffix}


def meet(file: str) -> None:
    """Sum a tensor over all ranks, and tell the process id."""
    one = torch.ones(1)
    if dist.is_initialized():
        dist.all_reduce(one)
    tell(file, [os.getpid(), int(one)])


def fail(file: str, how: str) -> None:
    """Rank 1 raises or dies, while the others wait for it."""
    if dist.get_rank() == 1:
        tell(file, time.time())
        if how == "dies":
            os.kill(os.getpid(), 9)
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(1))


def compute(file: str, seconds: float) -> None:
    """Python that is busy for so long, and touches a file as long as it is."""
    tell(file, time.time())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(10_000).sum()
        beat(file).touch()
        time.sleep(0.02)


def beat(file: str) -> Path:
    """What `compute` touches."""
    return Path(f"{file}.beat")


def make(name: str) -> tuple[nn.Module, Optimizer, tuple[Tensor, Tensor]]:
    """Model, optimizer and batch."""
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, torch.optim.AdamW(model.parameters(), 1e-3), batch_for(name)


class Clock:
    """Times the steps of a loop, and tells the first loss, the last, and the seconds of a step."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._losses: list[float] = []
        self._began = 0.0
        torch.set_num_threads(1)

    def begin_step(self) -> None:
        if len(self._losses) == UNTIMED:
            dist.barrier()
            self._began = time.perf_counter()

    def end_step(self, loss: Tensor) -> None:
        self._losses.append(loss.item())

    def end_loop(self) -> None:
        seconds = (time.perf_counter() - self._began) / (len(self._losses) - UNTIMED)
        tell(self._file, [self._losses[0], self._losses[-1], seconds])


def loop(
    model: nn.Module,
    optimizer: Optimizer,
    batch: tuple[Tensor, Tensor],
    steps: int,
    file: str,
    backward: Callable[[Tensor], Any] = Tensor.backward,
) -> None:
    clock = Clock(file)
    x, y = batch
    for _ in range(steps):
        clock.begin_step()
        loss = F.cross_entropy(model(x), y)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.end_step(loss)
    clock.end_loop()
