"""The tables on this machine: memory and pace of every strategy, the largest that fits, a pipeline's balance.

    make tables                          about ten minutes on two cores
    make tables SIZE=30 RANKS=4          a transformer of 30 million parameters, on 4 ranks only
    make tables MEMORY=500 COPY=here.md  what fits into 500 MB a rank; a copy in Markdown

Everything goes through cells of a real notebook kernel, on the devices that nbtrain finds. What is measured as a rank's
memory, and why, is said in tables_cells.py. A strategy that cannot be had, or fails, is a row with its reason.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import kernel
from benchmarks.tables_cells import NOTEBOOK
from benchmarks.tables_layout import Sheet, megabytes, spread, times
from benchmarks.tables_probe import MB, Failed, Lab, Shape
from benchmarks.tables_rows import dividing, rows
from nbtrain.annexes.planning.compare.measured_way import largest
from nbtrain.machine import gpus, host, registry
from tests.support.kernels import Kernel

BATCH = 8
"""sequences of 32 tokens in a step of all ranks together"""
BUCKET_MB = 2
FIRST = 4
"""so many blocks, or sequences, are tried first"""
SECONDS = 2.0
"""so long is a pace taken"""


class Paper:
    """What has been found: printed as it is, and kept for the copy."""

    def __init__(self) -> None:
        self.sheets: list[Sheet] = []
        self._began = time.monotonic()

    @contextmanager
    def sheet(self, title: str, *head: str) -> Iterator[Sheet]:
        found = Sheet(title, head)
        self.doing(title)
        yield found
        self.sheets.append(found)
        print(found.text(), end="\n\n", flush=True)

    def doing(self, what: str) -> None:
        print(f"  {self.seconds:4.0f} s  {what}", flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


def compared(paper: Paper, k: Kernel, shape: Shape, ranks: int) -> None:
    """Every strategy, the same work."""
    title = f"{ranks} ranks: {shape.parameters / 1e6:.1f} million parameters, {BATCH} × 32 tokens a step in all"
    with paper.sheet(title, "strategy", "memory a rank", "of ddp's", "steps/s", "of ddp's", "") as sheet:
        ddp: tuple[float, float] | tuple[None, None] = (None, None)
        for row in rows(ranks, BUCKET_MB):
            if row.lacks:
                sheet.failed(row.name, row.lacks)
                continue
            paper.doing(f"{row.line}")
            try:
                found = Lab(k, row.line, BATCH).measure(shape, BATCH, SECONDS)
            except Failed as why:
                sheet.failed(row.name, str(why))
                continue
            if row.name == "ddp":
                ddp = found.most, found.rate
            notes = [f"{row.ranks} rank" if row.ranks < ranks else "", spread(found.peaks)]
            sheet.row(
                row.name,
                megabytes(found.most),
                times(found.most, ddp[0]),
                f"{found.rate:.2f}",
                times(found.rate, ddp[1]),
                ", ".join(filter(None, notes)),
            )


def fitting(paper: Paper, k: Kernel, shape: Shape, ranks: int, memory: float) -> None:
    """The largest batch of one model, and the largest model, within so many megabytes a rank."""
    within = f"{ranks} ranks, {memory:,.0f} MB each"
    title = f"{within}: the largest batch for {shape.parameters / 1e6:.1f} million parameters"
    with paper.sheet(title, "strategy", "sequences a rank", "of ddp's", "") as sheet:
        for name, number, of_ddp in _largest(paper, sheet, k, ranks, memory, lambda n: (shape, n * ranks)):
            sheet.row(name, str(number), of_ddp)
    width = shape.width
    with paper.sheet(
        f"{within}: the largest model, blocks {width} wide, one sequence a rank",
        *("strategy", "blocks", "parameters", "of ddp's", ""),
    ) as sheet:
        for name, number, of_ddp in _largest(paper, sheet, k, ranks, memory, lambda n: (Shape(n, width), ranks)):
            sheet.row(name, str(number), f"{Shape(number, width).parameters / 1e6:.1f} M", of_ddp)


def _largest(
    paper: Paper, sheet: Sheet, k: Kernel, ranks: int, memory: float, made: Callable[[int], tuple[Shape, int]]
) -> Iterator[tuple[str, int, str]]:
    """Strategy by strategy: its name, the largest number whose model and batch fit, and what part of ddp's that is."""
    ddp: int | None = None
    for row in dividing(ranks, BUCKET_MB):
        paper.doing(row.line)
        tried: dict[int, int] = {}
        try:
            found = _search(Lab(k, row.line, BATCH), made, tried, memory, ddp or FIRST)
        except Failed as why:
            sheet.failed(row.name, f"{why} (tried: {', '.join(map(str, tried)) or 'nothing'})")
            continue
        if not found:
            sheet.failed(row.name, f"one takes {megabytes(tried[1])} already")
            continue
        if row.name == "ddp":
            ddp = found
        yield row.name, found, times(found, ddp)


def _search(
    lab: Lab, made: Callable[[int], tuple[Shape, int]], tried: dict[int, int], memory: float, guess: int
) -> int:
    def fits(number: int) -> bool:
        tried[number] = lab.measure(*made(number)).most
        return tried[number] <= memory * MB

    return largest(fits, guess)


def balanced(paper: Paper, k: Kernel, shape: Shape, ranks: int) -> None:
    """A pipeline whose ranks have about as much to do, and one whose last rank has nearly all."""
    layers = shape.layers + 2
    worst = ",".join(["1"] * (ranks - 1) + [str(layers - ranks + 1)])
    title = f"pipeline, {ranks} ranks: {shape.parameters / 1e6:.1f} million parameters in {layers} layers"
    with paper.sheet(title, "--balance", "memory, most", "memory, least", "steps/s", "of auto's", "") as sheet:
        auto: float | None = None
        for balance in ("auto", worst):
            line = f"-s pipeline --balance {balance} --devices {ranks}"
            paper.doing(line)
            try:
                found = Lab(k, line, BATCH, shape.layers).measure(shape, BATCH, SECONDS)
            except Failed as why:
                sheet.failed(balance, str(why))
                continue
            auto = auto or found.rate
            pace = f"{found.rate:.2f}", times(found.rate, auto)
            sheet.row(balance, megabytes(found.most), megabytes(min(found.peaks)), *pace, spread(found.peaks))


def main() -> None:
    read = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=(__doc__ or "").splitlines()[0])
    read.add_argument("--size", type=float, default=10, metavar="MILLIONS", help="parameters of the transformer")
    read.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    read.add_argument(
        "--memory",
        type=float,
        default=0,
        metavar="MB",
        help="of a rank; default: a quarter more than ddp holds, and 32",
    )
    read.add_argument("--copy", type=Path, metavar="FILE", help="the same in Markdown")
    asked = read.parse_args()
    shape = Shape.of(asked.size)
    memory = (
        asked.memory or 1.25 * 4 * 4 * shape.parameters / MB + 32
    )  # parameters, gradients, two states: four bytes each
    _refuse(asked.ranks, memory)
    paper = Paper()
    with kernel("%load_ext nbtrain", NOTEBOOK) as k:
        for ranks in asked.ranks:
            compared(paper, k, shape, ranks)
        fitting(paper, k, shape, asked.ranks[0], memory)
        if "pipeline" in registry.strategies():
            for ranks in asked.ranks:
                balanced(paper, k, shape, ranks)
    print(f"{paper.seconds / 60:.1f} minutes")
    if asked.copy:
        asked.copy.write_text("\n".join(sheet.markdown() for sheet in paper.sheets))


def _refuse(ranks: list[int], memory: float) -> None:
    """What would end in swapping, or on a system that does not say what a process has."""
    if not gpus.gpus() and not Path("/proc/self/clear_refs").exists():
        raise SystemExit("without a GPU, memory is read from /proc, which only Linux has")
    if min(ranks) < 2:
        raise SystemExit(f"RANKS={min(ranks)}: there is nothing to divide; at least 2")
    # Doubling tries up to twice the budget, and the notebook has its own.
    wanted, free = 3 * memory * MB * ranks[0], host.memory().available
    if wanted > free:
        raise SystemExit(
            f"MEMORY={memory:.0f} on {ranks[0]} ranks: {megabytes(wanted)} are tried; {megabytes(free)} are free"
        )


if __name__ == "__main__":
    main()
