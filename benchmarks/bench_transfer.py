"""Half a gigabyte, out to four ranks and home again."""

from __future__ import annotations

import mmap
import os
import time

import numpy as np

from benchmarks.measure import Table, kernel, median, run, seconds

SIZE = 512 << 20
USE = "%%distributed --devices 4\ndata.shape"
TOUCH = "data += 1"
MODEL = "import torch\nmodel = torch.nn.Linear(1 << 13, 1 << 14, bias=False)"
SEND = "%%distributed --devices 2\nmodel.weight.shape"
CHANGE = "%%distributed --devices 2\nwith torch.no_grad(): model.weight.add_(1)"


def fresh_memory() -> float:
    """Seconds to write as much into shared memory that nobody has touched."""
    data = np.ones(SIZE, np.uint8)
    fd = os.memfd_create("control")
    began = time.perf_counter()
    left = memoryview(data)
    while left.nbytes:
        left = left[os.write(fd, left) :]
    took = time.perf_counter() - began
    os.close(fd)
    return took


def touched_memory() -> float:
    """Seconds to copy as much into memory that was written before."""
    source = np.ones(SIZE, np.uint8)
    target = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    target[:] = 2
    began = time.perf_counter()
    target[:] = source
    return time.perf_counter() - began


def main() -> None:
    table = Table("512 MB")
    fresh, touched = median(3, fresh_memory), median(3, touched_memory)
    with kernel("%load_ext nbtrain", "import numpy as np", "%%distributed --devices 4\npass") as k:

        def first() -> float:
            run(k, f"data = np.ones({SIZE} // 8)")
            took = seconds(k, USE)
            run(k, "del data\n%distributed restart")
            return took

        control = f"fresh memory: {fresh:.2f} s"
        table.row("an array to 4 ranks, the first time", median(3, first), 1.2 * fresh, "s", control)
        run(k, f"data = np.ones({SIZE} // 8)")
        run(k, USE)

        def again() -> float:
            run(k, TOUCH)
            return seconds(k, USE)

        run(k, TOUCH), run(k, USE)
        table.row("changed and sent again", median(5, again), 3 * touched, "s", f"a copy: {touched:.2f} s")
    with kernel("%load_ext nbtrain", MODEL, SEND, CHANGE, CHANGE) as k:
        table.row(
            "weights changed on 2 ranks and home", median(5, lambda: seconds(k, CHANGE)), 3 * touched, "s",
            f"a copy: {touched:.2f} s",
        )  # fmt: skip


if __name__ == "__main__":
    main()
