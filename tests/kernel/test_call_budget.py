"""What a warm cell costs is counted, not timed: Python calls in the kernel and on a rank. A bound only ever goes down.

Twice a line that reads the metadata of installed packages came back into the way of every cell, three quarters of what
it cost, and no benchmark said so: times differ from machine to machine, calls do not.
"""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel

KERNEL = 1_250
"""calls; 3,877 while torch's metadata was read for each cell"""
RANK = 1_000
"""calls; 1,550 while every folder of torch was listed anew for each cell"""

COUNT = """
import sys
calls = 0
def count(frame, event, arg):
    global calls
    calls += event == "call"
"""
IN_KERNEL = """
shell = get_ipython()
def per_cell(line, cell, times=10):
    global calls
    for _ in range(3):
        shell.run_cell_magic("distributed", line, cell)
    calls = 0
    sys.setprofile(count)
    try:
        for _ in range(times):
            shell.run_cell_magic("distributed", line, cell)
    finally:
        sys.setprofile(None)
    print("calls:", calls / times)
"""
ON_RANK = """%%distributed --devices 2 --monitor off
import sys
class Calls:
    now = 0
    def __call__(self, frame, event, arg):
        Calls.now += event == "call"
sys.nbtrain_calls = Calls()
sys.setprofile(sys.nbtrain_calls)
"""


def counted(kernel: Kernel, cell: str) -> float:
    result = kernel.run(cell)
    assert result.error is None, result.text
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("calls:")]
    return float(line.split()[1])


@pytest.fixture
def warm(kernel: Kernel) -> Kernel:
    for cell in ("%load_ext nbtrain", COUNT + IN_KERNEL, *["%%distributed --devices 2\npass"] * 3):
        assert kernel.run(cell).error is None
    return kernel


def test_an_empty_cell_in_the_kernel(warm: Kernel) -> None:
    assert counted(warm, "per_cell('--devices 2', 'pass')") <= KERNEL


def test_an_empty_cell_on_a_rank(warm: Kernel) -> None:
    assert warm.run(ON_RANK).error is None
    empty = "%%distributed --devices 2\npass"
    ask = "%%distributed --devices 2\nif rank == 0:\n    print('calls:', sys.nbtrain_calls.now)"
    for _ in range(3):
        assert warm.run(empty).error is None
    before = counted(warm, ask)
    for _ in range(10):
        assert warm.run(empty).error is None
    after = counted(warm, ask)  # eleven cells' ends and beginnings lie between the two
    assert (after - before) / 11 <= RANK
