"""How long a cell takes to end once something goes wrong or Stop is pressed, what the next one takes, and what is lost.

    python -m benchmarks.bench_faults [times]

Times are those of one clock: a rank writes down when it fails or ends a step, and the reader of the notebook when the
cell has ended. Measured is the worst of all runs; the median stands beside it. After each run the notebook's weights
are compared with those that the same steps give in one process.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.boundaries import boundaries, seals
from benchmarks.measure import Table, python, run, say
from tests.support.kernels import Kernel, Result, running_kernel

START = """
import copy, ctypes, os, signal, time, torch, torch.distributed as dist
from torch import nn
torch.manual_seed(0)
X = torch.randn(32, 16)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
sgd = torch.optim.SGD(model.parameters(), 0.05)
taken = [0]
def one(model, sgd):
    model(X).square().mean().backward(); sgd.step(); sgd.zero_grad()
def mark():
    with open(f'mark{os.environ.get("RANK", "")}', 'w') as file: file.write(str(time.monotonic()))
expected, replay, expected_taken = copy.deepcopy(model), None, 0
replay = torch.optim.SGD(expected.parameters(), 0.05)
def lost():
    global expected_taken
    for _ in range(taken[0] - expected_taken): one(expected, replay)
    expected_taken = taken[0]
    return not all(torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), expected.parameters()))
"""
STEP = "one(model, sgd); taken[0] += 1\n"
NOTICED = """
from nbtrain.engines.base import Death
from nbtrain.engines.local import LocalPool
def _noting(poll):
    def noting(self, seconds):
        heard = poll(self, seconds)
        if any(isinstance(event, Death) for event in heard):
            with open('noticed', 'w') as file: file.write(str(time.monotonic()))
        return heard
    return noting
LocalPool.poll = _noting(LocalPool.poll)
"""
EXCEPTIONS = {
    "its peers wait in a collective": "if rank == 1: time.sleep(0.1); mark(); raise ValueError('no')\nbarrier()",
    "its peers compute": "if rank == 1: mark(); raise ValueError('no')\n"
    "big = torch.ones(300, 300)\nwhile True: big @ big",
    "its peers wait in a subgroup's collective": "pair = dist.new_group([0, 1])\n"
    "if rank == 1: time.sleep(0.1); mark(); raise ValueError('no')\n"
    "if rank == 0: dist.all_reduce(torch.ones(1), group=pair)\nbarrier()",
}
DEATHS = {
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGSEGV": "ctypes.string_at(0)",
    "os._exit": "os._exit(3)",
}


class Bench:
    """One kernel, its ranks, and what was measured."""

    def __init__(self, kernel: Kernel, head: str, dice: random.Random) -> None:
        self.kernel = kernel
        self.head = head
        self.dice = dice
        self.losses = self.runs = 0
        self.after: list[float] = []
        """seconds of the next cell"""
        self.noticed: list[float] = []
        for cell in ("%load_ext nbtrain", START, NOTICED, f"{head}\n{STEP}", f"{head}\n{STEP}"):
            run(kernel, cell)

    def fails(self, code: str) -> float:
        """Seconds from the failure to the cell's end."""
        return self._ended(self.kernel.start(f"{self.head}\nfor _ in range(2): {STEP}{code}"), ["mark1"])

    def dies(self, how: str) -> float:
        took = self.fails(f"if rank == 1: time.sleep(0.1); mark(); {how}\nbarrier()")
        self.noticed.append(self._at("noticed") - self._at("mark1"))
        return took

    def stops(self, code: str, marks: list[str]) -> float:
        """Seconds from the press, or from the end of the step in progress, to the cell's end."""
        result = self.kernel.start(f"{self.head}\nprint('going')\n{code}")
        self.kernel.wait_for(lambda: "going" in result.text, 60)
        time.sleep(self.dice.uniform(0.3, 0.9))
        pressed = time.monotonic()
        self.kernel.interrupt()
        return self._ended(result, marks, pressed)

    def _ended(self, result: Result, marks: list[str], since: float = 0.0) -> float:
        self.kernel.wait(result, timeout=120)
        ended = time.monotonic()
        if result.error is None:
            raise RuntimeError(f"nothing was raised:\n{result.text}")
        took = ended - max([since, *map(self._at, marks)])
        self._check()
        began = time.monotonic()
        run(self.kernel, f"{self.head}\n{STEP}")
        self.after.append(time.monotonic() - began)
        self._check()
        return took

    def _check(self) -> None:
        self.runs += 1
        self.losses += bool(run(self.kernel, say("lost()")))

    def _at(self, mark: str) -> float:
        return float((Path(self.kernel.home) / mark).read_text())


def rows(table: Table, bench: Bench, times: int, how: str, ranks: int) -> None:
    """`how`: said in each row."""

    def row(what: str, goal: float, measured: Callable[[], float], control: str = "") -> None:
        found = [measured() for _ in range(times)]
        told = f"median {statistics.median(found):.2f} of {times}{control}"
        table.row(f"{what}{how}", max(found), goal, "s", told)

    for where, code in EXCEPTIONS.items():
        row(f"a rank raises, {where}", 1.0, lambda: bench.fails(code))  # noqa: B023
    _next(table, bench, "after an exception", how, 0.5)
    for name, code in DEATHS.items():
        row(f"a rank dies of {name}", 1.0, lambda: bench.dies(code))  # noqa: B023
    found = bench.noticed
    median = f"median {statistics.median(found):.3f} of {len(found)}"
    table.row(f"until a death is noticed{how}", max(found), 0.2, "s", median)
    if "spawn" in how:
        took = python("import torch, torch._dynamo, torch.distributed")
        _next(table, bench, "after a death", how, 0.5 + took, f"; importing torch: {took:.2f} s, counted in the goal")
    else:
        _next(table, bench, "after a death", how, 0.5)
    marks = [f"mark{rank}" for rank in range(ranks)]
    for seconds in (0.05, 0.3):
        code = f"while True: time.sleep({seconds}); {STEP.strip()}; mark()"
        row(f"Stop, steps of {1e3 * seconds:.0f} ms: from the end of the step", 1.0, lambda: bench.stops(code, marks))  # noqa: B023
    row("Stop, time.sleep(1000): from the press", 1.0, lambda: bench.stops("time.sleep(1000)", []))
    row("Stop, a loop in Python: from the press", 1.0, lambda: bench.stops("n = 0\nwhile True: n += 1", []))
    _next(table, bench, "after Stop", how, 0.5)
    table.row(f"losses{how}", bench.losses, 0, "", f"of {bench.runs} comparisons with the expected weights")


def _next(table: Table, bench: Bench, what: str, how: str, goal: float, control: str = "") -> None:
    after, bench.after = bench.after, []
    told = f"median {statistics.median(after):.2f} of {len(after)}{control}"
    table.row(f"the next cell, {what}{how}", max(after), goal, "s", told)


def idle(table: Table, kernel: Kernel, ranks: int, seconds: float = 20.0) -> None:
    time.sleep(1)
    ours = [psutil.Process(kernel.pid), *kernel.children()]
    with running_kernel() as other:
        run(other, "import torch")
        time.sleep(1)
        bare = [psutil.Process(other.pid)]
        before, bare_before = [_busy([process]) for process in ours], _busy(bare)
        time.sleep(seconds)
        spent = [_busy([process]) - then for process, then in zip(ours, before, strict=True)]
        control = _busy(bare) - bare_before
    told = f"the kernel {100 * spent[0] / seconds:.2f} %; one without any {100 * control / seconds:.2f} %"
    table.row(f"kernel, nursery and {ranks} idle ranks, of one core", 100 * sum(spent) / seconds, 1.0, "%", told)


def _busy(processes: list[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    dice = random.Random(0)
    table = Table(f"what goes wrong; 4 ranks (spawn: 2); the worst of {times}")
    with running_kernel() as kernel:
        rows(table, Bench(kernel, "%%distributed --devices 4 --monitor off", dice), times, "", 4)
        idle(table, kernel, 4)
    with running_kernel() as kernel:
        few = max(2, times // 3)
        bench = Bench(kernel, "%%distributed --devices 2 --monitor off --start spawn", dice)
        rows(table, bench, few, " · spawn", 2)
    boundaries(table)
    seals(table)


if __name__ == "__main__":
    main()
