"""Runs in the background: what must not be lost, held or changed by reading, stopping or hurrying them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nbtrain.defer_interrupts import Presses
from nbtrain.training.checkpoints.live_weights import LiveWeights
from nbtrain.training.loop.shared_board import OPEN, STEPS, WEIGHTS, OwnedBoard
from tests.support.kernels import Kernel
from tests.support.notebook import TRAIN, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.thorough]

LONG = """
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
    nb("import threading; lock = threading.Lock()")
    assert nb.fails("%%distributed -d 2 --background --monitor off\nlock.acquire()").ename == "CannotTravel"
    assert nb("print(nbtrain.background())").stdout == "None\n"
    assert nb("%%distributed -d 2\nif rank == 0: print('here')").stdout.endswith("here\n")


def test_reading_changes_nothing_of_what_comes_home(nb: Notebook) -> None:
    """Ranks send home what they have changed since the cell began; what was read in between is not that."""
    nb("first = {name: value.clone() for name, value in model.state_dict().items()}")
    nb.in_background(f"{LONG.replace('400', '60')}\nmodel.load_state_dict(first)")
    nb(READ)
    assert nb("print(torch.equal(before, seen))").stdout == "False\n"
    nb("nbtrain.background().wait()")
    assert nb(SAME).stdout == "True\n", "it ended where it began"
    nb.in_background(LONG.replace("400", "5"), "--keep model")
    nb(READ)
    nb("nbtrain.background().wait()")
    assert nb(SAME).stdout == "True\n", "kept on the ranks"
    last = nb("%%distributed -d 2\nif rank == 0: print(torch.equal(seen, model[0].weight))").stdout
    assert last.endswith("False\n"), "theirs went on"


def test_a_run_that_fails_leaves_the_notebook_as_it_was_even_if_it_was_read(nb: Notebook) -> None:
    nb.in_background(LONG.replace("    if rank == 0:", "    if epoch == 4: 1 / 0\n    if rank == 0:"))
    nb(READ)
    assert nb.fails("nbtrain.background().wait()").ename == "ZeroDivisionError"
    assert nb("print(torch.equal(before, model[0].weight), len(opt.state), nbtrain.background().values)").stdout == (
        "True 0 {}\n"
    )
    assert "has what the failed cell had done until step 15" in nb("%distributed recover").stdout
    assert nb(SAME).stdout == "False\n"


def test_stop_while_a_cell_waits_for_a_step_stops_that_cell(nb: Notebook) -> None:
    nb.in_background(LONG.replace("time.sleep(0.01)", "time.sleep(0.01 if epoch == 0 else 4)"))
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


def test_what_was_changed_in_place_meanwhile_is_told(nb: Notebook) -> None:
    nb("losses, mine, note = [], [], 'first'")
    began = nb.in_background(LONG.replace("400", "5").replace("time.sleep", "losses.append(1); note; time.sleep"))
    nb("losses.append('mine'); mine.append('mine'); note = 'second'")
    nb("nbtrain.background().wait()")
    assert "changed in the notebook while the run went on, and changed by the run: losses. The" in began.stdout
    assert nb("print('mine' in losses, mine, note, nbtrain.background().values)").stdout == (
        "False ['mine'] second {}\n"
    ), "what the run has only read is not its work"


def test_nothing_changes_under_a_cell_that_awaits(nb: Notebook) -> None:
    began = nb.in_background(LONG.replace("400", "2"))
    nb("import asyncio\nlast = model[0].weight.detach().clone()\nawait asyncio.sleep(2)\n"
       "assert torch.equal(last, model[0].weight)")  # fmt: skip
    assert "the run is over" in began.stdout, "right after that cell"


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


def test_nothing_is_held_when_it_is_over(nb: Notebook) -> None:
    nb.in_background(LONG.replace("400", "3"))
    nb(READ)
    nb("import gc, weakref; nbtrain.background().wait(); dead = weakref.ref(model)")
    nb("del model, opt, loader")
    assert nb("gc.collect(); print(dead())").stdout == "None\n"


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("options", ["-s none", "-s pipeline"])
def test_a_read_harms_no_strategy(nb: Notebook, options: str) -> None:
    code = LONG.replace("400", "6")
    if "none" in options:
        code = code.replace("loss.backward()", "print(end=''); loss.backward()")
    began = nb.in_background(code, options)
    said = nb(READ).stdout
    assert ("nothing is known of what the ranks hold" if "none" in options else "as after step") in said
    nb("nbtrain.background().wait()")
    assert "the run is over" in began.stdout
    assert nb(SAME).stdout == "False\n"
