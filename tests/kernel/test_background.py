"""`--background`: a run goes on while the notebook is used, its work comes home by itself, and nothing is lost, held or
changed by reading, stopping or hurrying it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.base.keyboard_interrupts import Presses
from nbtrain.worker.checkpoints.live_weights import LiveWeights
from nbtrain.worker.loop.shared_board import OPEN, STEPS, WEIGHTS, OwnedBoard
from tests.support.kernels import Kernel
from tests.support.notebook import TRAIN, Notebook

pytestmark = pytest.mark.kernel

LONG = """
for epoch in range(400):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); opt.step(); opt.zero_grad()
        log(loss=loss); time.sleep(0.01)
    print('epoch', epoch)
"""
SHORT = LONG.replace("400", "4")
PLAIN = """
for epoch in range(400):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); opt.step(); opt.zero_grad()
        time.sleep(0.01)
    if rank == 0: print('epoch', epoch)
"""
READ = "seen = model[0].weight.detach().clone()"
SAME = "print(torch.equal(before, model[0].weight))"


@pytest.fixture
def nb(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook(f"import time, nbtrain; torch.manual_seed(0); {TRAIN}; before = model[0].weight.detach().clone()")
    yield notebook
    notebook("%distributed stop")


@pytest.mark.thorough
def test_a_run_that_cannot_begin_is_none(nb: Notebook) -> None:
    """The first test of this kernel, which has had no run yet."""
    nb("import threading; lock = threading.Lock()")
    assert nb.fails("%%distributed -d 2 --background --monitor off\nlock.acquire()").ename == "CannotTravel"
    assert nb("print(nbtrain.background())").stdout == "None\n"
    assert nb("%%distributed -d 2\nif rank == 0: print('here')").stdout.endswith("here\n")


def test_its_work_comes_home_when_the_kernel_is_idle(nb: Notebook) -> None:
    began = nb.in_background(SHORT)
    assert nb("print(1 + 1)").stdout == "2\n"
    nb.kernel.wait_for(lambda: "nbtrain: the run is over, 12 steps" in began.text)  # no cell was needed for that
    assert "epoch 3" in began.stdout, "below the cell that started it"
    assert nb("print(epoch, nbtrain.background().error)").stdout == "3 None\n"
    nb(f"mine = model[0].weight.detach().clone(); torch.manual_seed(0); {TRAIN}")
    nb(f"%%distributed -d 2{SHORT}")
    assert nb("print(torch.equal(mine, model[0].weight), len(_oh) > 0)").stdout == "True True\n", "as in the foreground"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_cell_that_reads_its_model_gets_the_last_finished_step(nb: Notebook, strategy: str) -> None:
    nb.in_background(LONG, options=f"-s {strategy}")
    said = nb("first = model[0].weight.detach().clone(); print(torch.equal(first, before), opt.state != {})").stdout
    assert "model, opt: as after step" in said
    assert said.endswith("False True\n")
    time.sleep(0.3)
    assert nb("show = lambda: torch.equal(first, model[0].weight)").stdout == "", "said once"
    nb("first = model[0].weight.detach().clone()")
    time.sleep(0.3)
    assert nb("print(show())").stdout == "False\n", "read through a function too"
    assert nb("other = 3; print(other)").stdout == "3\n"
    nb("print(nbtrain.background().stop().error)")
    assert nb("print(len(nbtrain.background().metrics['loss']) == nbtrain.background().steps > 3)").stdout == "True\n"


@pytest.mark.thorough
def test_weights_are_had_of_a_run_that_has_hardly_begun(nb: Notebook) -> None:
    began = nb(f"%%distributed -d 2 --background --monitor off {LONG}")  # the ranks are about to start
    said = nb("print(torch.equal(model[0].weight, before))").stdout
    assert "model: as after step" in said
    assert said.endswith("False\n")
    nb.kernel.wait_for(lambda: "epoch 19" in began.stdout)
    nb("nbtrain.background().stop()")
    nb(f"%%distributed -d 2 --background --monitor off {LONG}")
    step = re.search(r"as after step (\d+) of the run", nb("model").stdout)
    nb("nbtrain.background().stop()")
    assert step is not None
    assert int(step[1]) <= int(nb("nbtrain.background().steps").value or 0), "the run's own steps"


def test_what_the_notebook_assigns_meanwhile_stays(nb: Notebook) -> None:
    nb("kept, gone = [1], [2]")
    began = nb.in_background(f"{LONG.replace('400', '9')}\nkept = 'the run'; gone.append(3); fresh = 4")
    nb("kept = 'mine'; del gone; fresh = 5")
    nb("run = nbtrain.background().wait()")
    assert nb("print(kept, fresh, 'gone' in dir())").stdout == "mine 5 False\n"
    assert nb("print(sorted(run.values.items()))").stdout == ("[('fresh', 4), ('gone', [2, 3]), ('kept', 'the run')]\n")
    said = "assigned in the notebook while the run went on: "
    assert said in began.stdout
    assert nb("%%distributed -d 2\nprint(kept, fresh)").stdout.endswith("mine 5\n"), "and so the ranks have it"


def test_stop_keeps_its_work_and_a_failure_is_shown_below_its_cell(nb: Notebook) -> None:
    began = nb.in_background(LONG)
    assert "the ranks are in use: <run of In [" in nb.refused("%%distributed -d 2\nprint(1)")
    assert "running>" in nb("%distributed status").stdout
    assert "Cell In[" in nb("%distributed where").stdout
    assert nb("run = nbtrain.background(); run.stop()").value.endswith("steps, stopped>")
    assert "nbtrain: stopped after step" in began.stdout
    assert nb("print(torch.equal(before, model[0].weight), isinstance(run.error, KeyboardInterrupt))").stdout == (
        "False True\n"
    )
    began = nb.in_background(LONG.replace("print('epoch', epoch)", "print('epoch', epoch)\n    if epoch == 1: 1 / 0"))
    assert nb.fails("nbtrain.background().wait()").ename == "ZeroDivisionError"
    assert nb("nbtrain.background()").value.endswith("failed>")
    assert "ZeroDivisionError: division by zero" in began.text


def test_the_ranks_can_be_ended_and_so_can_the_kernel(kernel: Kernel, tmp_path: Path) -> None:
    nb = Notebook(kernel)
    nb(f"import os; os.environ['NBTRAIN_HISTORY'] = {str(tmp_path)!r}")
    nb(f"import time, nbtrain; {TRAIN}; before = model[0].weight.detach().clone()")
    began = nb.in_background(LONG)
    nb("while not nbtrain.background().steps: time.sleep(0.05)")
    nb("nbtrain.background().kill()")
    assert "the notebook is as it was" in began.stdout
    assert nb("nbtrain.history()[-1].ended").value == "'killed'"
    assert nb("print(torch.equal(before, model[0].weight))").stdout == "True\n"
    nb.in_background(LONG)
    nb("%distributed stop")  # the run's work first
    assert nb("print(torch.equal(before, model[0].weight))").stdout == "False\n"
    nb.in_background(LONG)  # the fixture says what is left when the kernel is shut down now


def test_a_server_sees_that_the_kernel_is_not_idle(nb: Notebook) -> None:
    """Jupyter Server ends kernels of which it has heard nothing for long; any message counts that a cell has caused."""
    nb("import nbtrain.notebook.run.cell_run as run; run.KEEP_ALIVE = 0.2")
    nb.in_background(LONG)
    stirred = 0
    until = time.monotonic() + 20
    while stirred < 3 and time.monotonic() < until:
        message = nb.kernel.client.get_iopub_msg(timeout=20)
        of_a_cell = message["parent_header"].get("msg_type") == "execute_request"
        stirred += message["msg_type"] == "nbtrain_stirs" and of_a_cell
    assert stirred == 3
    nb("run.KEEP_ALIVE = 30.0; nbtrain.background().stop()")


@pytest.mark.thorough
def test_a_run_that_has_ended_does_not_go_on_while_the_notebook_computes(kernel: Kernel, tmp_path: Path) -> None:
    nb = Notebook(kernel)
    nb(f"import os; os.environ['NBTRAIN_HISTORY'] = {str(tmp_path)!r}")
    nb(f"import time, nbtrain; torch.manual_seed(0); {TRAIN}")
    nb.in_background(SHORT)
    seen = nb("""run = nbtrain.background(); controls = run._going.run.controls; feed = run._observers.feed
while not feed.homeward: time.sleep(0.01)
time.sleep(3)
row = feed.figures.of(0).row()
print(row['state'], feed.ended, controls.do('kill'))""").stdout
    said = "The ranks have ended; what they did comes home as soon as the notebook is idle."
    assert seen.endswith(f"done None (False, '{said}')\n")
    nb("run.wait()")
    assert nb("nbtrain.history()[-1].ended").value == "'done'"
    assert float(nb("nbtrain.history()[-1].seconds").value or 9) < 3
    nb.in_background(LONG)
    seen = nb("""run = nbtrain.background(); feed = run._observers.feed
print(run._going.run.controls.do('kill')[0])
while feed.ended is None: time.sleep(0.01)
print(feed.ended['how'])""").stdout
    assert seen.endswith("True\nkilled\n"), "at once: nothing is to come"


@pytest.mark.thorough
def test_reading_changes_nothing_of_what_comes_home(nb: Notebook) -> None:
    """Ranks send home what they have changed since the cell began; what was read in between is not that."""
    nb("first = {name: value.clone() for name, value in model.state_dict().items()}")
    nb.in_background(f"{PLAIN.replace('400', '60')}\nmodel.load_state_dict(first)")
    nb(READ)
    assert nb("print(torch.equal(before, seen))").stdout == "False\n"
    nb("nbtrain.background().wait()")
    assert nb(SAME).stdout == "True\n", "it ended where it began"
    nb.in_background(PLAIN.replace("400", "5"), "--keep model")
    nb(READ)
    nb("nbtrain.background().wait()")
    assert nb(SAME).stdout == "True\n", "kept on the ranks"
    last = nb("%%distributed -d 2\nif rank == 0: print(torch.equal(seen, model[0].weight))").stdout
    assert last.endswith("False\n"), "theirs went on"


@pytest.mark.thorough
def test_a_run_that_fails_leaves_the_notebook_as_it_was_even_if_it_was_read(nb: Notebook) -> None:
    nb.in_background(PLAIN.replace("    if rank == 0:", "    if epoch == 4: 1 / 0\n    if rank == 0:"))
    nb(READ)
    assert nb.fails("nbtrain.background().wait()").ename == "ZeroDivisionError"
    assert nb("print(torch.equal(before, model[0].weight), len(opt.state), nbtrain.background().values)").stdout == (
        "True 0 {}\n"
    )
    assert "has what the failed cell had done until step 15" in nb("%distributed recover").stdout
    assert nb(SAME).stdout == "False\n"


@pytest.mark.thorough
def test_stop_while_a_cell_waits_for_a_step_stops_that_cell(nb: Notebook) -> None:
    nb.in_background(PLAIN.replace("time.sleep(0.01)", "time.sleep(0.01 if epoch == 0 else 4)"))
    waiting = nb.kernel.start("print('it ran'); model")
    nb.kernel.wait_for(lambda: "waiting for the run" in waiting.stdout)
    nb.kernel.interrupt()
    nb.kernel.wait(waiting)
    assert "the cell was not run" in waiting.text
    assert "it ran" not in waiting.text
    assert "Traceback" not in waiting.text
    assert nb("print('the next one does')").stdout == "the next one does\n"
    nb("nbtrain.background().kill()")
    assert nb(SAME).stdout == "True\n"


@pytest.mark.thorough
def test_what_was_changed_in_place_meanwhile_is_told(nb: Notebook) -> None:
    nb("losses, mine, note = [], [], 'first'")
    began = nb.in_background(PLAIN.replace("400", "5").replace("time.sleep", "losses.append(1); note; time.sleep"))
    nb("losses.append('mine'); mine.append('mine'); note = 'second'")
    nb("nbtrain.background().wait()")
    assert "changed in the notebook while the run went on, and changed by the run: losses. The" in began.stdout
    assert nb("print('mine' in losses, mine, note, nbtrain.background().values)").stdout == (
        "False ['mine'] second {}\n"
    ), "what the run has only read is not its work"


@pytest.mark.thorough
def test_nothing_changes_under_a_cell_that_awaits(nb: Notebook) -> None:
    began = nb.in_background(PLAIN.replace("400", "2"))
    nb("import asyncio\nlast = model[0].weight.detach().clone()\nawait asyncio.sleep(2)\n"
       "assert torch.equal(last, model[0].weight)")  # fmt: skip
    assert "the run is over" in began.stdout, "right after that cell"


@pytest.mark.thorough
def test_a_button_and_then_the_notebooks_own_stop_are_one_wish() -> None:
    presses = Presses()
    presses.only_count()
    presses.ask()
    presses.ask()
    presses.hear(2, None)
    assert presses.count == 1, "stopped at the end of a step, and its work comes home"
    presses._last -= 1  # a second later
    presses.hear(2, None)
    assert presses.count == 2, "it is not waited for any longer"


@pytest.mark.thorough
def test_a_wish_that_ranks_may_be_on_their_way_to_is_not_replaced(tmp_path: Path) -> None:
    """Who is past its step would miss the next one, and the others wait for him in a collective."""
    board = OwnedBoard(2, str(tmp_path))
    try:
        for part, ended in zip(board.parts, (4, 3), strict=True):
            part[OPEN], part[STEPS] = 7, ended
        weights = LiveWeights(board, 7, str(tmp_path), {})
        assert weights.ask() == 5
        number = board.head[WEIGHTS]
        assert not weights.fetch(lambda: True), "nobody has written it"
        assert weights.stand_still()
        board.parts[0][STEPS] = 6
        assert not weights.stand_still()
        assert (weights.ask(), board.head[WEIGHTS]) == (5, number), "rank 1 has still to come there"
        board.parts[1][STEPS] = 6
        assert weights.ask() == 7
        assert board.head[WEIGHTS] > number
    finally:
        board.close()


@pytest.mark.thorough
def test_nothing_is_held_when_it_is_over(nb: Notebook) -> None:
    nb.in_background(PLAIN.replace("400", "3"))
    nb(READ)
    nb("import gc, weakref; nbtrain.background().wait(); dead = weakref.ref(model)")
    nb("del model, opt, loader")
    assert nb("gc.collect(); print(dead())").stdout == "None\n"


@pytest.mark.thorough
@pytest.mark.sample(first=1)
@pytest.mark.parametrize("options", ["-s none", "-s pipeline"])
def test_a_read_harms_no_strategy(nb: Notebook, options: str) -> None:
    code = PLAIN.replace("400", "6")
    if "none" in options:
        code = code.replace("loss.backward()", "print(end=''); loss.backward()")
    began = nb.in_background(code, options)
    said = nb(READ).stdout
    assert ("nothing is known of what the ranks hold" if "none" in options else "as after step") in said
    nb("nbtrain.background().wait()")
    assert "the run is over" in began.stdout
    assert nb(SAME).stdout == "False\n"
