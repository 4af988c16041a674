"""Where the time of a step goes: by a clock that the tests move, on ranks that wait for each other, and on a card."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from nbtrain.base.events import PHASES
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.worker.measure.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, UNDECIDED, CardClock, PhaseTimer
from tests.support.bench import Bench, make_runtime
from tests.support.ranks import run_on_ranks


class Clock:
    """Stands still until it is moved. What is computed moves it: a sample 1, a forward 10, a backward 100, a step 1000,
    anything else 10000."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at

    def pass_by(self, seconds: float) -> None:
        self.at += seconds


class Samples(Dataset[torch.Tensor]):
    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.pass_by(1)
        return torch.ones(2)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        clock.pass_by(10)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.clock.pass_by(100)
        return grad, None


class Clocked(nn.Module):
    """What it computes moves a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Slow.apply(self.layer(x), self.clock)
        return found


class SGD(torch.optim.SGD):
    def __init__(self, model: Clocked) -> None:
        super().__init__(model.parameters(), 0.1)
        self.clock = model.clock

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.clock.pass_by(1000)
        super().step()
        return loss


class Timed(Bench):
    """One rank, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.model = Clocked(self.clock)
        self.optimizer = SGD(self.model)
        self.phases = self.runtime.phases = PhaseTimer(clock=self.clock)
        for part in (
            self.runtime.loaders,
            self.runtime.backward_and_step,
            self.runtime.collective_guard,
            self.runtime.readings,
        ):
            part.phases = self.phases

    def batches(self, samples: int = 4) -> DataLoader[torch.Tensor]:
        return DataLoader(Samples(self.clock, samples), 2)

    def seconds(self, loop: Callable[[], None], accumulate: int = 1, **objects: object) -> dict[str, float]:
        """Of a cell, in each phase; those without any are left out."""
        self.cell(loop, accumulate, **(objects or {"model": self.model, "optimizer": self.optimizer}))
        return {name: seconds for name, seconds in zip(PHASES, self.phases.seconds(), strict=True) if seconds}

    def learn(self, x: torch.Tensor) -> None:
        self.model(x).sum().backward()


@pytest.fixture
def bench() -> Iterator[Timed]:
    here = Timed()
    here.runtime.install()
    yield here
    here.runtime.uninstall()


X = torch.ones(2, 2)


def test_a_plain_loop(bench: Timed) -> None:
    def loop() -> None:
        for x in bench.batches():
            bench.learn(x)
            bench.optimizer.step()
            bench.clock.pass_by(10000)

    assert bench.seconds(loop) == {"data": 4, "forward": 20, "backward": 200, "optimizer": 2000, "rest": 20000}


def test_without_a_loader_what_comes_before_a_backward_is_the_forward(bench: Timed) -> None:
    def loop() -> None:
        for _ in range(3):
            bench.learn(X)
            bench.optimizer.step()
        bench.clock.pass_by(10000)

    # Nobody knows where the first forward began: the cell has done other things before.
    assert bench.seconds(loop) == {"forward": 20, "backward": 300, "optimizer": 3000, "rest": 10000}


def test_accumulated_backwards(bench: Timed) -> None:
    def loop() -> None:
        for x in bench.batches(samples=8):
            bench.learn(x)
            bench.optimizer.step()

    assert bench.seconds(loop, accumulate=2) == {"data": 8, "forward": 40, "backward": 400, "optimizer": 2000}


def test_a_closure_is_no_optimizers_work(bench: Timed) -> None:
    def loop() -> None:
        for x in bench.batches():

            def closure() -> torch.Tensor:
                loss = bench.model(x).sum()  # noqa: B023 it is called at once
                loss.backward()
                return loss

            bench.optimizer.step(closure)

    assert bench.seconds(loop) == {"data": 4, "forward": 20, "backward": 200, "optimizer": 2000}


def test_an_evaluation_has_data_and_forwards(bench: Timed) -> None:
    def loop() -> None:
        with torch.no_grad():
            for x in bench.batches():
                bench.model(x)
        bench.clock.pass_by(10000)

    assert bench.seconds(loop) == {"data": 4, "forward": 20, "rest": 10000}


def test_a_cell_without_a_model_has_none(bench: Timed) -> None:
    words = []

    def loop() -> None:
        for _ in bench.batches():
            bench.clock.pass_by(10000)
            words.append(bench.phases.word(True))

    assert bench.seconds(loop, numbers=[1, 2]) == {}
    assert words == ["", ""]


def test_a_loader_that_another_thread_runs_ahead_with_is_passed_over(bench: Timed) -> None:
    def loop() -> None:
        for x in bench.batches(2):
            ahead = threading.Thread(target=lambda: [*bench.batches(6)])
            ahead.start()
            ahead.join()
            bench.learn(x)

    assert bench.seconds(loop) == {"data": 2, "forward": 16, "backward": 100}


def test_the_word_for_what_goes_on(bench: Timed) -> None:
    words = []

    def say() -> None:
        words.append(bench.phases.word(bench.runtime.steps.loading))

    def loop() -> None:
        say()
        for x in bench.batches(2):
            say()
            loss = bench.model(x).sum()
            loss.register_hook(lambda grad: say())
            loss.backward()
            bench.optimizer.register_step_post_hook(lambda *_: say())
            bench.optimizer.step()
            say()
        bench.learn(X)
        say()

    bench.seconds(loop)
    # torch calls the hooks of a class whose `step` calls its parent's twice, once the parent has been used itself.
    assert [word for word, _ in groupby(words)] == ["", "forward", "backward", "optimizer", "rest", "forward"]


def test_a_failed_backward_is_over_and_the_next_cell_begins_at_nothing(bench: Timed) -> None:
    def fails() -> None:
        for x in bench.batches():
            loss = bench.model(x).sum()
            loss.register_hook(lambda grad: 1 / 0)
            loss.backward()

    with pytest.raises(ZeroDivisionError):
        bench.seconds(fails)
    assert bench.phases.word(False) == ""
    bench.clock.pass_by(10000)
    assert bench.seconds(lambda: bench.clock.pass_by(10000)) == {}


def test_what_another_thread_reads_never_goes_back_and_adds_up() -> None:
    phases = PhaseTimer()
    over = threading.Event()
    read: list[tuple[float, ...]] = []

    def reading() -> None:
        while not over.is_set():
            read.append(phases.seconds())

    began = time.perf_counter()
    phases.begin(True)
    reader = threading.Thread(target=reading)
    reader.start()
    for _ in range(20_000):
        for phase in (DATA, FORWARD, BACKWARD, UNDECIDED, OPTIMIZER, UNDECIDED):
            phases.mark(phase)
    phases.end()
    over.set()
    reader.join()
    assert len(read) > 10
    for earlier, later in pairwise(read):
        assert all(a <= b for a, b in zip(earlier, later, strict=True))
    assert sum(phases.seconds()) <= 1.05 * (time.perf_counter() - began)


# --- other ranks ------------------------------------------------------------------------------------


def _one_is_late(rank: int) -> tuple[float, ...]:
    runtime = make_runtime(rank, 2)
    runtime.install()
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    runtime.begin(RunSpec(pool=PoolSpec(devices=("cpu", "cpu")), strategy="ddp"), {"model": model})
    model(X).sum().backward()
    loss = model(X).sum()
    if rank == 1:
        time.sleep(0.4)
    loss.backward()
    runtime.end(True)
    runtime.uninstall()
    return runtime.phases.seconds()


def test_waiting_for_another_rank_is_no_part_of_the_backward() -> None:
    early, late = (dict(zip(PHASES, found, strict=True)) for found in run_on_ranks(_one_is_late))
    assert early["communication"] > 0.3 > early["backward"]
    assert late["forward"] > 0.3 > late["communication"]


# --- a card that is behind --------------------------------------------------------------------------


class Gpu:
    """Passes marks when it is told how far it has come. Its time has nothing to do with the host's."""

    def __init__(self) -> None:
        self.queue: deque[tuple[GpuMark, float]] = deque()
        self.made = 0
        self.end = 500.0
        """of what has been queued so far"""

    def mark(self) -> GpuMark:
        self.made += 1
        return GpuMark(self)

    def launch(self, seconds: float) -> None:
        self.end += seconds

    def catch_up(self) -> None:
        while self.queue:
            mark, at = self.queue.popleft()
            mark.at = at


class GpuMark:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.at: float | None = None

    def record(self) -> None:
        self.at = None
        self.gpu.queue.append((self, self.gpu.end))

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, other: GpuMark) -> float:
        assert self.at is not None, "a real one would raise"
        assert other.at is not None, "a real one would raise"
        return (other.at - self.at) * 1000


def test_on_a_card_the_cards_own_time_counts_one_step_later() -> None:
    gpu = Gpu()
    phases = PhaseTimer(CardClock(gpu.mark))
    phases.begin(True)
    found = []
    for _ in range(4):
        phases.mark(DATA)
        gpu.launch(1)
        phases.mark(FORWARD)
        gpu.launch(10)
        phases.mark(BACKWARD)
        gpu.launch(100)
        phases.mark(UNDECIDED)
        phases.mark(OPTIMIZER)
        gpu.launch(1000)
        phases.mark(UNDECIDED)
        found.append([round(seconds) for seconds in phases.seconds()])
        gpu.catch_up()
    phases.mark(DATA)
    assert found[0] == [0, 0, 0, 0, 0, 0], "nothing is waited for"
    assert found[1] == [1, 10, 100, 0, 1000, 0]
    assert found[3] == [3, 30, 300, 0, 3000, 0]
    phases.end()
    assert [round(seconds) for seconds in phases.seconds()] == [4, 40, 400, 0, 4000, 0]
    assert gpu.made < 20, "marks are used again"


def test_a_card_that_waits_for_data_is_seen_to_wait() -> None:
    gpu = Gpu()
    phases = PhaseTimer(CardClock(gpu.mark))
    phases.begin(True)
    phases.mark(DATA)
    before = phases.seconds()[DATA]
    time.sleep(0.02)
    assert phases.seconds()[DATA] == before == 0, "it may still be at what came before"
    gpu.catch_up()
    assert phases.seconds()[DATA] >= 0.02
    phases.end()
