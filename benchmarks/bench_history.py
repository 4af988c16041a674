"""What keeping a run costs: the kernel for each value that is logged, the disk, and reading it all back.

python -m benchmarks.bench_history
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from time import perf_counter

import nbtrain
from benchmarks.measure import Table
from nbtrain.base.events import Metrics
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.watch.runs.write_run_file import Recorder, settings

VALUES = 1_000_000
RUNS = 200


def main() -> None:
    where = Path(tempfile.mkdtemp())
    os.environ["NBTRAIN_HISTORY"] = str(where)
    try:
        measure(where)
    finally:
        shutil.rmtree(where)


def measure(where: Path) -> None:
    events = [
        Metrics(rank=0, time=time.time(), points={"loss": [(step, (step * 7 % 1013) / 3)]}) for step in range(VALUES)
    ]
    began = perf_counter()
    for event in events:
        json.dumps(event.points["loss"])
    plain = perf_counter() - began

    recorder = Recorder(lambda: settings(RunSpec(pool=PoolSpec()), source="pass", number=1))
    recorder.opened("")
    began = perf_counter()
    for number, event in enumerate(events):
        recorder.receive(event)
        if number % 10_000 == 0:
            recorder.tick(number / 10_000)
    recorder.closed(True)
    kept = perf_counter() - began
    (path,) = where.iterdir()

    began = perf_counter()
    rows = len(nbtrain.history()[-1].metrics)
    read = perf_counter() - began
    for number in range(2, RUNS + 1):
        os.link(path, where / f"{number:05}.jsonl")
    began = perf_counter()
    assert len(repr(nbtrain.history()).splitlines()) == RUNS + 2
    table_of_all = perf_counter() - began

    table = Table("the history of runs")
    each = 1e6 / VALUES
    table.row("one value that is logged", kept * each, 4 * plain * each + 2, "µs", f"as JSON: {plain * each:.2g} µs")
    table.row("the file of a million values", path.stat().st_size / 1e6, 8, "MB", f"{rows:,} rows are kept")
    table.row("reading its metrics", read, 5, "s", "into a DataFrame")
    table.row(f"the table of {RUNS} such runs", table_of_all * 1e3, 500, "ms", "their first and last lines")


if __name__ == "__main__":
    main()
