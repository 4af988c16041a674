"""Hours of a notebook's life in one kernel with four ranks, and whether anything has grown or slowed down by then.

    make soak MINUTES=60 SEED=0

Each cycle does everything of `soak_cells.py` in a random order, runs some standard cells against the clock and reads
memory, descriptors, threads and files. The first cycles are the warm-up. At the end the first cycles after it are
compared with the last ones, by medians; then whole pools are started and ended. What has grown is marked, and the
exit code is 1.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

from benchmarks.soak_cells import RANKS, STANDARD, START, Notebook, cycle, one_raises
from benchmarks.soak_readings import BARE, Control, Reading, take
from tests.support.kernels import running_kernel

FLAT = 1.02
"""times as much memory as before is as much"""
AS_FAST = 1.15
"""times as long as before is as fast, on a machine that others use too"""
WARM_UP = 0.1
LEAST = 3
"""cycles of warm-up, and of each side of the comparison"""
STANDARDS = 20
"""standard cells in a cycle"""
HUNDRED = 100
POOLS = 8
TEXTS = 4.0
"""MB: what ranks wrote to descriptors is given back 64 KB late, and stacks that were asked for are not"""
ANY = float("inf")
"""for rows that are only told"""
SAY_EVERY = 5.0


class Soak:
    """One run."""

    def __init__(self, nb: Notebook, control: Control, minutes: float, seed: int) -> None:
        self.nb = nb
        self.control = control
        self.dice = random.Random(seed)
        self.began = time.monotonic()
        self.ends = self.began + 60 * minutes
        self.readings: list[Reading] = []
        self.times: list[float] = []
        """of standard cells, after the warm-up"""
        self.bare: list[float] = []
        """of cells that do nothing, beside them"""
        self.warm_at: int | None = None
        """the first cycle that counts"""
        self.wrong = 0
        self._said = 0.0

    def say(self, what: str, now: bool = False) -> None:
        at = time.monotonic()
        if now or at - self._said > SAY_EVERY:
            self._said = at
            left = max(0.0, self.ends - at)
            print(
                f"{at - self.began:6.0f} s, {left:5.0f} s to go · cycle {len(self.readings) + 1} · {what}", flush=True
            )

    def run(self) -> None:
        while self.warm_at is None or time.monotonic() < self.ends or len(self.readings) - self.warm_at < 2 * LEAST:
            for what, act in cycle(self.dice):
                self.say(what)
                act(self.nb, self.dice)
            one_raises(self.nb, self.dice)  # the process group is a new one whenever things are read
            self._standard_cells()
            self.readings.append(take(self.nb, self.control))
            self._say_reading(self.readings[-1])
            warmed = time.monotonic() - self.began > WARM_UP * (self.ends - self.began)
            if self.warm_at is None and len(self.readings) >= LEAST and warmed:
                self.warm_at = len(self.readings)

    def _standard_cells(self) -> None:
        self.say("standard cells")
        for code, times in ((STANDARD, self.times), ("pass", self.bare)):
            self.nb.run(code)
            for _ in range(STANDARDS):
                began = time.perf_counter()
                result = self.nb.run(code)
                took = time.perf_counter() - began
                if result.error is not None:
                    raise RuntimeError(result.text)
                if self.warm_at is not None:
                    times.append(took)

    def _say_reading(self, reading: Reading) -> None:
        memory = ", ".join(f"{name} {size:.2f}" for name, size in reading.memory.items())
        fds = "/".join(map(str, reading.descriptors.values()))
        took = f"{1e3 * statistics.median(self.times[-STANDARDS:]):.1f} ms" if self.times else "warming up"
        self.say(f"{self.nb.cells} cells, MB: {memory}; memfds {reading.held:.2f}; "
                 f"descriptors {fds}; standard cell {took}", now=True)  # fmt: skip

    # -- the report ----------------------------------------------------------------------

    def report(self) -> None:
        assert self.warm_at is not None
        counted = self.readings[self.warm_at :]
        size = max(LEAST, len(counted) // 4)
        first, last = counted[:size], counted[-size:]
        cells = len(self.times)
        print(f"\n{len(self.readings)} cycles, {self.nb.cells} cells, {self.warm_at} cycles of warm-up; the "
              f"first and the last {size} cycles after it\n"
              f"{'':4}{'what':<52}{'first':>10}{'last':>10}  change")  # fmt: skip
        self._memory(first, last, [name for name in first[0].memory if name != BARE])
        self._flat(f"files that are memory, and {TEXTS:g}, MB", first, last, lambda r: r.held + TEXTS, min)
        for name in first[0].descriptors:
            self._flat(f"descriptors of {name}", first, last, lambda r: r.descriptors[name], min)  # noqa: B023
            self._flat(f"threads of {name}", first, last, lambda r: r.threads[name], min)  # noqa: B023
        self._flat("files in /dev/shm", first, last, lambda r: r.shm, min)
        self._flat("temporary files", first, last, lambda r: r.files, min)
        self._flat("processes", first, last, lambda r: r.processes, min)
        hundred = min(HUNDRED, cells // 3)
        slower = max(1.0, statistics.median(self.bare[-hundred:]) / statistics.median(self.bare[:hundred]))
        self._row(f"standard cells, ms: {hundred} of {cells}", 1e3 * statistics.median(self.times[:hundred]),
                  1e3 * statistics.median(self.times[-hundred:]), AS_FAST * slower)  # fmt: skip
        self._row("cells that do nothing, ms (the control)", 1e3 * statistics.median(self.bare[:hundred]),
                  1e3 * statistics.median(self.bare[-hundred:]), ANY)  # fmt: skip
        self._flat(f"{BARE}, as many cells, MB", first, last, lambda r: r.memory[BARE], limit=ANY)
        for name in first[0].private:
            self._flat(f"private to {name}, MB", first, last, lambda r: r.private[name], limit=ANY)  # noqa: B023
            self._flat("the same before malloc_trim, MB", first, last, lambda r: r.untrimmed[name], limit=ANY)  # noqa: B023

    def _memory(self, first: list[Reading], last: list[Reading], names: Iterable[str]) -> None:
        for name in names:
            notebooks = name == "kernel"
            grown = notebooks and statistics.median(r.memory[BARE] for r in last) - statistics.median(
                r.memory[BARE] for r in first
            )
            less = ", less the control's growth" if notebooks else ""
            then, now = (statistics.median(r.memory[name] for r in side) for side in (first, last))
            self._row(f"memory of {name}{less}, MB", then, now - grown, FLAT)

    def _flat(
        self, what: str, first: list[Reading], last: list[Reading], of: Callable[[Reading], float],
        level: Callable[[Iterable[float]], float] = statistics.median, limit: float = 0.0,
    ) -> None:  # fmt: skip
        """Memory may be 2 % more; of what is counted the lowest is compared: what the last act has left for a moment is
        nothing that grows."""
        self._row(what, level(map(of, first)), level(map(of, last)), limit or (FLAT if "MB" in what else 1.0))

    def _row(self, what: str, first: float, last: float, limit: float = 1.0) -> None:
        ok = last <= first * limit
        self.wrong += not ok
        change = f"{100 * (last / first - 1):+.1f} %" if first else f"{last - first:+g}"
        mark = "" if limit == ANY else "ok" if ok else "!!"
        print(f"{mark:<4}{what:<52}{first:>10.5g}{last:>10.5g}  {change}", flush=True)

    # -- pools ---------------------------------------------------------------------------

    def pools(self) -> None:
        """Other ranks, again and again."""
        readings = []
        for number in range(POOLS):
            self.say(f"pool {number + 1} of {POOLS}", now=True)
            self.nb(
                f"%%distributed --devices 2\nF.cross_entropy(model(X), Y).backward(); opt.step(); done[0] += {number}"
            )
            self.nb("%distributed restart")
            self.nb(STANDARD)
            readings.append(take(self.nb, self.control))
        half = POOLS // 2
        first, last = readings[1:half], readings[half:]
        print(f"\n{3 * POOLS} pools, medians of the first and the second half")
        self._memory(first, last, ("kernel", "nursery"))
        for name in ("kernel", "nursery"):
            self._flat(f"descriptors of {name}", first, last, lambda r: r.descriptors[name], min)  # noqa: B023
            self._flat(f"threads of {name}", first, last, lambda r: r.threads[name], min)  # noqa: B023
        self._flat("temporary files", first, last, lambda r: r.files, min)


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as temporary,
        running_kernel(TMPDIR=temporary) as kernel,
        running_kernel() as bare,
    ):
        print(f"{minutes:g} minutes on {RANKS} ranks, seed {seed}; starting", flush=True)
        nb = Notebook(kernel)
        for cell in ("%load_ext nbtrain", START, STANDARD):
            nb(cell)
        soak = Soak(nb, Control(bare), minutes, seed)
        soak.run()
        soak.report()
        soak.pools()
        print(f"\n{soak.wrong} of these are not as they should be" if soak.wrong else "\nflat", flush=True)
        return 1 if soak.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
