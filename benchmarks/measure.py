"""What the benchmarks share: medians, a real kernel, and a table in which every row has its goal and its control.

A number by itself says more about the machine than about the code, so each row is compared with something
plain that was measured in the same run: an import, a bare cell, a copy.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.kernels import Kernel, running_kernel

MARK = "measured:"
"""Begins the line in which a cell says what it measured."""


@contextmanager
def kernel(*cells: str) -> Iterator[Kernel]:
    """A fresh kernel in which these cells have run."""
    with running_kernel() as found:
        for cell in cells:
            run(found, cell)
        yield found


def run(where: Kernel, cell: str) -> Any:
    """Run a cell; what it gave to `say`, if it did. Raises if the cell did."""
    result = where.run(cell, timeout=240)
    if result.error is not None:
        raise RuntimeError(f"{cell}\n{result.text}")
    said = [line for line in result.stdout.splitlines() if line.startswith(MARK)]
    return json.loads(said[-1].removeprefix(MARK)) if said else None


def say(expression: str) -> str:
    """The line of a cell that hands the value of an expression to `run`."""
    return f"import json; print({MARK!r} + json.dumps({expression}))"


def seconds(where: Kernel, cell: str) -> float:
    """How long a cell takes as its reader sees it: from the request to the end."""
    began = time.perf_counter()
    run(where, cell)
    return time.perf_counter() - began


def median(times: int, measured: Callable[[], float]) -> float:
    return statistics.median(measured() for _ in range(times))


def in_turns(times: int, *measured: Callable[[], float]) -> list[float]:
    """The median of each, taken in turns, so that a busy moment of the machine meets all of them."""
    gc.collect()
    rounds = [[one() for one in measured] for _ in range(times)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


@dataclass
class Table:
    """Prints its rows as they come."""

    title: str

    def __post_init__(self) -> None:
        print(f"{self.title}\n{'':4}{'what':<64}{'measured':>12}{'goal':>12}   control", flush=True)

    def row(self, what: str, measured: float, goal: float, unit: str, control: str = "") -> None:
        """`goal`: at most so much. What misses it is marked; nothing fails: machines differ, and are busy."""
        mark = "ok" if measured <= goal else "!!"
        number = f"{measured:,.3g} {unit}" if measured < 1000 else f"{measured:,.0f} {unit}"
        print(f"{mark:<4}{what:<64}{number:>12}{f'≤ {goal:,.3g} {unit}':>12}   {control}", flush=True)


def python(code: str) -> float:
    """Seconds that a fresh Python needs for this, from its start to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began
