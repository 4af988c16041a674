"""All processes stop for a while, as when a laptop sleeps or a job is suspended: nobody is given up, and the cell
ends with the weights it would have had. And one rank alone is stopped: it is said which, and how it goes on.

FAULTS=all freezes for half a minute, more often, with both ways to start and where ranks hold pieces.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from tests.support.hygiene import marked
from tests.support.kernels import MARK, Kernel, Result
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.limit(300)]

ALL = os.environ.get("FAULTS") == "all"
SLEEP = 30.0 if ALL else 3.0
"""Seconds; all time limits of nbtrain's own are shorter than the long one, and most than the short one."""
KINDS = ["warm", "spawn", "warm --strategy fsdp", "warm --strategy deepspeed"] if ALL else ["warm"]

BEGIN = """
import time, hashlib
def fresh():
    global model, opt, loader
    torch.manual_seed(0)
    model = net(); opt = adamw(model); loader = DataLoader(data, batch_size=16, shuffle=True)
def state():
    tensors = [*model.state_dict().values(), *(v for s in opt.state.values() for v in s.values())]
    return hashlib.blake2b(b''.join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
"""
STEPS = """
done = 0
while done < {limit}:
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        if rank: time.sleep({pause})
        loss.backward(); opt.step(); opt.zero_grad()
        done += 1; print('step', done)
        if done == {limit}: break
"""
ENDLESS = 10**9


class Frozen(Notebook):
    """Trains in steps of which rank 1's take a while, so that rank 0 waits for it."""

    start = "warm"
    """how ranks start, and whatever else the magic is to say"""

    def cell(self, limit: int, pause: float = 0.0, options: str = "") -> str:
        magic = f"%%distributed --devices 2 --start {self.start} --monitor off {options}"
        return magic + STEPS.format(limit=limit, pause=pause)

    def state(self) -> str:
        return self("print(state())").stdout

    def undisturbed(self, steps: int) -> str:
        """What so many steps make of the weights."""
        self("fresh()")
        self(self.cell(steps))
        return self.state()


@pytest.fixture(params=KINDS)
def notebook(request: pytest.FixtureRequest, shared_kernel: Kernel) -> Iterator[Frozen]:
    made = Frozen(shared_kernel)
    made.start = request.param
    shared_kernel.client.hb_channel.stop()  # it takes a new socket whenever it hears nothing for a second
    made("torch.set_num_threads(1)\n" + BEGIN)
    yield made
    made("%distributed stop")


def freeze(kernel: Kernel, seconds: float = SLEEP) -> None:
    """Everything that the kernel is and has started, what is just being born too."""
    stopped: dict[int, psutil.Process] = {}
    try:
        while new := [process for process in marked(MARK, kernel.mark) if process.pid not in stopped]:
            for process in new:
                stopped[process.pid] = process
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
        time.sleep(seconds)
    finally:
        for process in stopped.values():
            with suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.mark.thorough
def test_in_the_middle_of_a_cell(notebook: Frozen) -> None:
    """Also no rank is said to wait for another: it has not, in its own time."""
    right = notebook.undisturbed(6)
    before = notebook.pids()
    notebook("fresh()")
    cell = notebook.kernel.start(notebook.cell(6, 0.4, f"--hang-after {SLEEP - 1}"))
    notebook.kernel.wait_for(lambda: "step 2" in cell.stdout)
    freeze(notebook.kernel)
    notebook.kernel.wait(cell)
    assert cell.error is None, cell.text
    assert "have waited" not in cell.text
    assert notebook.state() == right
    assert notebook.pids() == before


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", ["warm", "spawn"] if ALL else ["spawn"], indirect=True)
def test_while_ranks_start(notebook: Frozen) -> None:
    right = notebook.undisturbed(3)
    for delay in (0.1, 0.5, 2.0) if ALL else (0.3,):
        notebook("%distributed stop")
        notebook("fresh()")
        cell = notebook.kernel.start(notebook.cell(3))
        time.sleep(delay)  # somewhere on the way
        freeze(notebook.kernel)
        notebook.kernel.wait(cell)
        assert cell.error is None, cell.text
        assert notebook.state() == right


@pytest.mark.thorough
def test_one_rank_alone(notebook: Frozen) -> None:
    """It is named; it may go on; and who does not want to wait presses Stop twice and has a fresh one."""
    notebook("fresh()")
    notebook(notebook.cell(1))
    first, second = notebook.pids()
    notebook("fresh()")
    before = notebook.state()
    cell = notebook.kernel.start(notebook.cell(ENDLESS, 0.05, "--hang-after 1"))
    notebook.kernel.wait_for(lambda: "step 3" in cell.stdout)
    os.kill(second, signal.SIGSTOP)
    notebook.kernel.wait_for(lambda: "ranks appear stuck" in cell.text, 20)
    notebook.kernel.wait_for(lambda: f"rank 1 is stopped by a signal; kill -CONT {second} lets it go on" in cell.text)
    assert "rank 0 waits in " in cell.text
    os.kill(second, signal.SIGCONT)
    at = steps(cell)
    notebook.kernel.wait_for(lambda: steps(cell) > at + 3)
    os.kill(second, signal.SIGSTOP)
    notebook.kernel.interrupt()
    notebook.kernel.wait_for(lambda: "Press Stop again to end these ranks" in cell.text, 20)
    time.sleep(1.5)  # long enough for rank 0 to be freed, if this machine has time for it
    notebook.kernel.interrupt()
    error = notebook.kernel.wait(cell).error
    assert error is not None
    assert error.ename == "KeyboardInterrupt"
    found = notebook.state()
    if "as it was before" in error.evalue:
        assert found == before
    else:
        taken = int(notebook("print(done)").stdout)
        assert f"stopped after step {taken};" in error.evalue
        assert notebook.undisturbed(taken) == found
        assert notebook.pids()[0] == first
    notebook(notebook.cell(1))
    assert notebook.pids()[1] != second


def steps(cell: Result) -> int:
    return cell.stdout.count("step ")
