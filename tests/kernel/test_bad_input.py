"""Everything a user can get wrong, or that can go wrong under him: what he is told, and that nothing is lost."""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, TRAIN, Notebook

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def ready(module_kernel: Kernel) -> Notebook:
    return Notebook(module_kernel)


@pytest.fixture
def fresh(ready: Notebook) -> Iterator[Notebook]:
    """No ranks before; and after what it is about, still none."""
    ready("%distributed stop")
    yield ready
    assert not ready.running()


@pytest.fixture
def notebook(ready: Notebook) -> Iterator[Notebook]:
    """The next cell has to work, with the notebook's names as they were."""
    ready("keep = [1, 2]; " + TRAIN)
    yield ready
    shown = ready("%%distributed --devices 2\nassert keep == [1, 2]\nprint('still here')" + LOOP)
    assert "still here" in shown.stdout
    ready("assert keep == [1, 2]\n%distributed stop")


# --- what is typed wrong: one line, and nothing is started -------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%%distributed --devcies 2", "--devices"),
        ("%%distributed -s dpp --devices 2", "ddp"),
        ('%%distributed --devices "0,1"', "GPU"),
        ("%%rank 7 --devices 2", "ranks are 0 to 1"),
    ],
)
def test_a_wrong_line_is_one_line(fresh: Notebook, line: str, says: str) -> None:
    fresh("x = 1")
    shown = fresh.refused(line + "\nx = 2")
    assert shown.startswith("UsageError: ")
    assert says.lower() in shown.lower()
    fresh("assert x == 1")


def test_a_name_that_nobody_has_is_found_before_anything_starts(fresh: Notebook) -> None:
    fresh("model = 1")
    error = fresh.fails("%%distributed --devices 2\nx = 1\nprint(modle)")
    assert "'modle' is not defined in the notebook; did you mean 'model'?" in error.evalue
    assert "did you mean 'model'? Nothing was sent." in error.traceback
    assert "line 3" in error.traceback
    assert "nbtrain/" not in error.traceback


def test_an_object_that_cannot_travel_is_named(fresh: Notebook) -> None:
    fresh("""
import threading
class Holder: pass
holder = Holder(); holder.table = {'a': [1, threading.Lock()]}
lines = (i for i in range(3))""")
    error = fresh.fails("%%distributed --devices 2\nprint(holder, next(lines))")
    assert error.ename == "CannotTravel"
    assert "holder.table['a'][1] (_thread.lock) cannot travel" in error.evalue
    assert "lines (generator) cannot travel" in error.evalue
    assert "make it inside the cell" in error.evalue
    assert "nbtrain/" not in error.traceback
    fresh("assert next(lines) == 0\n%distributed stop")


# --- what goes wrong while it runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["barrier()", "gather(1)", "reduce(1.0)", LOOP, "torch.distributed.barrier()"])
def test_some_ranks_do_not_wait_for_the_others(notebook: Notebook, code: str) -> None:
    error = notebook.fails("%%rank 1 --devices 2\n" + code)
    assert error.ename == "NotSupported"
    assert "needs every rank, and this cell runs on rank 1 only" in error.evalue
    assert "nbtrain/" not in error.traceback
    assert "site-packages" not in error.traceback
    notebook("%%rank 0 --devices 2\nwith torch.no_grad(): scores = model(X).sum()")  # what needs nobody is fine


def test_nobody_can_type_on_a_rank(notebook: Notebook) -> None:
    for code in ("input('your name? ')", "import getpass; getpass.getpass()"):
        started = time.monotonic()
        shown = notebook.refused("%%distributed --devices 2 --monitor off\n" + code)
        assert time.monotonic() - started < 20
        assert "ask in an ordinary cell" in shown
        assert "breakpoint()" in shown


def test_other_settings_get_other_ranks_and_say_so(notebook: Notebook) -> None:
    notebook("%%distributed --devices 2" + LOOP)
    first = notebook.pids()
    shown = notebook("%%distributed --devices 3\nassert world_size == 3" + LOOP)
    note = [line for line in shown.stdout.splitlines() if "new ranks" in line]
    assert len(note) == 1
    assert "--devices" in note[0]
    assert len(notebook.pids()) == 3
    assert not any(psutil.pid_exists(pid) for pid in first)
    notebook("assert opt.state[model[0].weight]['step'] == 5")


def test_exceptions_are_the_users_own(notebook: Notebook) -> None:
    notebook("class Mine(Exception):\n    def __init__(self, code): super().__init__(f'code {code}'); self.code = code")
    notebook("def check(x):\n    if x: raise Mine(x)  # in another cell")
    error = notebook.fails("%%distributed --devices 2\nkeep.append(3)\n\ncheck(7)")
    assert (error.ename, error.evalue) == ("Mine", "code 7")
    assert "----> 4 check(7)" in error.traceback
    assert "raise Mine(x)  # in another cell" in error.traceback
    assert "nbtrain/" not in error.traceback
    notebook("""
try:
    get_ipython().run_cell_magic('distributed', '--devices 2', 'check(5)')
except Mine as error:
    assert error.code == 5 and type(error) is Mine""")
    error = notebook.fails("%%distributed --devices 2\n{}['missing']")
    assert error.ename == "KeyError"


def test_who_waits_for_a_rank_that_failed_is_freed(notebook: Notebook) -> None:
    started = time.monotonic()
    error = notebook.fails("%%distributed --devices 2\nif rank == 1: raise ValueError('boom')\nbarrier()")
    assert time.monotonic() - started < 20
    assert (error.ename, error.evalue) == ("ValueError", "boom")
    assert "raised on rank 1" in error.traceback
    assert "rank 0" in error.traceback


@pytest.mark.parametrize(
    ("strategy", "pause"), [("ddp", "0.7 if rank == 0 else 0"), ("none", "0.7 if rank == 0 else 0.02")]
)
def test_a_rank_that_is_slower_than_its_peers_stops_after_a_whole_step(
    notebook: Notebook, strategy: str, pause: str
) -> None:
    notebook("import time; before, after = [], []")
    result = notebook.kernel.start(f"""%%distributed --devices 2 --strategy {strategy} --monitor off
for x, y in loader:
    F.cross_entropy(model(x), y).backward(); before.append(1); opt.step(); opt.zero_grad()
    if len(before) == 3: print('begun')
    time.sleep({pause})
    after.append(1)
""")
    notebook.kernel.wait_for(lambda: "begun" in result.stdout, 20)
    notebook.kernel.interrupt()
    notebook.kernel.wait(result, 20)
    assert "stopped after step" in result.text
    notebook("assert len(before) == len(after), (before, after)")


def test_a_stopped_cell_that_awaited_does_not_go_on_later(notebook: Notebook) -> None:
    notebook("import asyncio; seen = []")
    result = notebook.kernel.start(
        "%%distributed --devices 2 --monitor off\nprint('begun')\n"
        "while True:\n    await asyncio.sleep(0.05)\n    seen.append(1)"
    )
    notebook.kernel.wait_for(lambda: "begun" in result.stdout)
    notebook.kernel.interrupt()
    notebook.kernel.wait(result, 15)
    assert result.error is not None
    assert result.error.ename == "KeyboardInterrupt"
    notebook(
        "%%distributed --devices 2 --monitor off\n"
        "before = len(seen)\nawait asyncio.sleep(0.5)\nassert len(seen) == before, 'the stopped cell runs on'"
    )


def test_a_rank_that_somebody_kills_is_told_of_in_a_few_lines_with_its_line(notebook: Notebook) -> None:
    notebook("%%distributed --devices 2 --monitor off" + LOOP)
    pid = notebook.pids()[1]
    running = notebook.kernel.start("%%distributed\nimport time\nprint('begun', flush=True)\ntime.sleep(60)  # here")
    notebook.kernel.wait_for(lambda: "begun" in running.stdout)
    time.sleep(0.3)
    kill(pid)
    notebook.kernel.wait(running)
    assert running.error is not None
    lines = running.error.evalue.splitlines()
    assert re.fullmatch(
        rf"rank 1 \(process {pid}\) was ended by SIGKILL, last seen at Cell In\[\d+\], line 4: "
        r"time.sleep\(60\)  # here.*", lines[0],
    )  # fmt: skip
    assert "SIGKILL can also come from a user, a job scheduler or a container's limit." in running.error.evalue
    assert "It was probably not memory: rank 1 had " in running.error.evalue
    assert "--strategy" not in running.error.evalue, "no advice that is none"
    assert len(lines) <= 4, running.error.evalue


def kill(pid: int) -> None:
    """Until it is gone. A process is called a zombie when its first thread has ended: the others, with its memory and
    its connections, may take tens of milliseconds more, and a cell that begins in these has a rank that is there."""
    ended = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([ended], [], [], 10)[0]
    finally:
        os.close(ended)


@pytest.mark.parametrize("late", [0, 0.4], ids=["told at once", "told late"])
def test_a_rank_that_dies_between_cells_is_replaced(notebook: Notebook, late: float) -> None:
    """Whoever forked it tells of its death, and may get to that after the next cell has begun."""
    notebook("%%distributed --devices 2" + LOOP)
    other, dead = notebook.pids()
    nursery = psutil.Process(dead).parent()
    assert nursery is not None
    if late:
        nursery.suspend()
    kill(dead)
    running = notebook.kernel.start("%%distributed --devices 2" + LOOP)
    time.sleep(late)
    nursery.resume()
    shown = notebook.kernel.wait(running)
    assert shown.error is None, shown.text
    assert "SIGKILL" in shown.stdout
    notebook("assert opt.state[model[0].weight]['step'] == 6")
    assert notebook.pids()[0] == other


# --- the extension and the machine ------------------------------------------------------------------------------


@pytest.mark.thorough
def test_loaded_again_and_unloaded(notebook: Notebook) -> None:
    notebook("%%distributed --devices 2\npass")
    pids = notebook.pids()
    assert "ranks were stopped" in notebook("%reload_ext nbtrain").stdout
    assert not any(psutil.pid_exists(pid) for pid in pids)
    notebook("%%distributed --devices 2" + LOOP)
    notebook("%unload_ext nbtrain")
    result = notebook.kernel.run("%%distributed --devices 2\npass")
    assert "not found" in result.text
    assert notebook("%load_ext nbtrain").text == ""


def test_two_notebooks_at_once(notebook: Notebook, kernel: Kernel) -> None:
    other = Notebook(kernel)
    other(TRAIN)
    cell = "%%distributed --devices 2" + LOOP + "print(gather(rank))"
    both = [notebook.kernel.start(cell), kernel.start(cell)]
    for one, result in zip((notebook.kernel, kernel), both, strict=True):
        one.wait(result)
        assert result.error is None
        assert "[0, 1]" in result.stdout
    assert not set(notebook.pids()) & set(other.pids())


def test_what_a_function_of_ours_refuses_in_the_middle_of_a_training_is_shown_where_it_is(notebook: Notebook) -> None:
    """And that steps were kept is said; where there were none, it is one line."""
    late = "\ndef bad(step):\n    if step == 1: log(loss=[1, 2])\nfor step, (x, y) in enumerate(loader):"
    loop = LOOP.partition("for x, y in loader:")[2]
    said = notebook.kernel.run(f"%%distributed --devices 2{late}{loop}\n    bad(step)").text
    assert re.search(r"Cell In\[\d+\], line 3, in bad", said), said
    assert "UsageError: log(loss=...) takes a number" in said
    assert "was kept: %distributed recover restores it." in said
    assert "nbtrain/" not in said
    notebook("%distributed stop")
    assert notebook.refused("%%distributed --devices 2 --monitor off\nlog(loss=[1])").startswith("UsageError: log(loss")
