"""One training under one line of options, in a real kernel: what it took, or why it did not go."""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks import tables_cells as cells
from benchmarks.measure import run, say
from tests.support.kernels import Kernel

MB = 1_000_000
PATIENCE = 180
"""seconds that a cell may take"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a transformer: so many blocks, each so wide."""

    layers: int
    width: int

    @classmethod
    def of(cls, millions: float, layers: int = 8) -> Shape:
        """The one that has about so many million parameters; heads are 32 wide."""
        return cls(layers, max(1, round(math.sqrt(millions * 1e6 / 12 / layers) / 32)) * 32)

    @property
    def parameters(self) -> int:
        width = self.width
        block = 12 * width**2 + 13 * width
        ends = (256 + 32) * width + 2 * width + 256 * (width + 1)
        return self.layers * block + ends


@dataclass(frozen=True, slots=True)
class Reading:
    peaks: tuple[int, ...]
    """bytes of each rank, at the most"""
    rate: float
    """steps a second; 0: not measured"""

    @property
    def most(self) -> int:
        return max(self.peaks)


class Failed(Exception):
    """It did not go: the first line of why."""


class Lab:
    """Ranks under one line of options, started anew for it, and what they have when next to nothing is trained."""

    def __init__(self, kernel: Kernel, line: str, batch: int, layers: int = 4) -> None:
        """`batch`: the least that this line can share out; `layers`: of a model that it can divide."""
        self._kernel = kernel
        self._line = f"{line} {cells.OPTIONS}"
        run(kernel, "%distributed restart")
        self._cell(cells.ANEW.format(layers=layers, width=32, batch=batch) + "; floor = []")
        self._cell(cells.BARE.format(line=self._line))
        self._floor: list[int] = run(kernel, say("floor"))

    def measure(self, shape: Shape, batch: int, seconds: float = 0) -> Reading:
        """`seconds`: for so long the pace is taken, too. `batch` is that of all ranks together."""
        self._cell(cells.ANEW.format(layers=shape.layers, width=shape.width, batch=batch) + "; found = None")
        self._cell(cells.MEASURED.format(line=self._line, seconds=seconds))
        peaks, rate = run(self._kernel, say("found"))
        return Reading(tuple(most - had for most, had in zip(peaks, self._floor, strict=True)), rate)

    def _cell(self, text: str) -> None:
        shown = self._kernel.start(text)
        try:
            self._kernel.wait(shown, PATIENCE)
        except TimeoutError:
            self._kernel.interrupt()
            self._kernel.wait(shown, PATIENCE)
            raise Failed(f"not done within {PATIENCE} s") from None
        if shown.error is not None:
            raise Failed(f"{shown.error.ename}: {shown.error.evalue}".strip().splitlines()[0])
        for said in shown.stderr.splitlines():
            if said.startswith("UsageError: "):  # IPython shows that as a line, and not as an error
                raise Failed(said.removeprefix("UsageError: "))
