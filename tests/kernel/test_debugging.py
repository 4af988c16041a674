"""Debugging on ranks: post-mortem, breakpoints, and where each rank is, from the notebook's own input line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel, Result
from tests.support.notebook import LOOP, TRAIN, Notebook

pytestmark = pytest.mark.kernel

FAILS = """
def step(batch):
    wanted = rank + 40
    if rank == 1:
        raise ValueError('on purpose')
    return barrier()
"""


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    yield made
    made("%distributed stop")


def typed(notebook: Notebook, code: str, *answers: object) -> Result:
    return notebook.kernel.type(code, *answers)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_post_mortem(notebook: Notebook, strategy: str) -> None:
    notebook(TRAIN + FAILS)
    cell = f"%%distributed -s {strategy} -d 2 --monitor off" + LOOP + "    step(x)\n"
    assert notebook.fails(cell).ename == "ValueError"
    said = typed(
        notebook, "%distributed debug", "p wanted, rank", "up", "p x.shape", "wanted = 1", "down", "a", "w", "l",
        "sum(p.numel() for p in model.parameters())", "pp nobody", "q",
    )  # fmt: skip
    assert said.error is None, said.text
    assert {prompt for prompt, _ in said.prompts} == {"(Pdb, rank 1) "}
    for line in (
        "(41, 1)", "torch.Size([16, 4])", "raise ValueError('on purpose')", "58", "step()", "batch = tensor",
        "NameError: name 'nobody' is not defined", "Cell In[",
    ):  # fmt: skip
        assert line in said.stdout, said.text
    assert "nbtrain/" not in said.text
    assert "IPython" not in said.text
    other = typed(notebook, "%distributed debug 0", "u", "p rank", "q")  # it was stopped where it waited
    assert "0\n" in other.stdout
    assert "(Pdb, rank 0) " in other.text
    again = typed(notebook, "%debug", "p wanted", "c")
    assert "41\n" in again.stdout
    notebook(f"%%distributed -s {strategy} -d 2 --monitor off" + LOOP)
    assert "there is nothing to debug" in notebook("%distributed debug").stdout
    assert "nothing to debug on rank 1" in notebook("%distributed debug 1").stdout
    assert "there is no rank 2; there are 0 to 1" in notebook.refused("%distributed debug 2")


def test_leaving_a_post_mortem(notebook: Notebook) -> None:
    """By Stop, also while an expression is evaluated; without an input line; after the rank's death."""
    notebook(FAILS)
    assert "there is nothing to debug" in notebook("%distributed debug").stdout
    failing = "%%distributed -d 2 --monitor off\nstep(1)"
    notebook.fails(failing)
    left = typed(notebook, "%distributed debug", "p wanted", notebook.kernel.interrupt)
    assert left.error is None, left.text
    assert left.stdout.rstrip().endswith("41"), left.text
    busy = notebook.kernel
    pids = notebook.pids()

    def interrupted() -> None:
        busy.client.input("import time; time.sleep(60)")
        time.sleep(0.5)
        busy.interrupt()

    began = time.monotonic()
    slow = typed(notebook, "%distributed debug", interrupted, "p wanted + 1", "q")
    assert time.monotonic() - began < 20
    assert "KeyboardInterrupt" in slow.text
    assert "42\n" in slow.stdout
    assert "input line" in notebook.refused("%distributed debug")  # `run` allows no stdin
    assert notebook.pids() == pids
    refused = typed(notebook, "%distributed debug 1", "reduce(1)", "import torch", "torch.distributed.barrier()", "q")
    assert "barrier needs every rank" in refused.text, refused.text
    assert "reduce needs every rank" in refused.text, refused.text
    dead = typed(notebook, "%distributed debug", lambda: os.kill(pids[1], signal.SIGKILL))
    assert dead.error is None, dead.text
    assert "rank 1" in dead.stdout
    assert "SIGKILL" in dead.stdout
    assert "its frames with it" in dead.stdout
    assert "2\n" in notebook("%%distributed -d 2 --monitor off\nprint(world_size)").stdout


def test_debug_of_the_notebooks_own_error(notebook: Notebook) -> None:
    notebook(FAILS)
    notebook.fails("%%distributed -d 2 --monitor off\nstep(1)")
    notebook.fails("here = 6\n1 / 0")
    shown = typed(notebook, "%debug", "p here * 7", "q")
    assert "42\n" in shown.text
    assert "rank" not in shown.prompts[0][0]
    assert "(Pdb, rank 1)" in typed(notebook, "%distributed debug", "q").text


def test_what_a_failed_cell_holds_is_free_at_the_next(notebook: Notebook) -> None:
    notebook("import weakref, gc\nclass Big: pass\n")
    notebook.fails(
        "%%distributed -d 2 --monitor off\ndef f():\n    big = Big(); __builtins__.seen = weakref.ref(big); 1/0\nf()"
    )
    shown = notebook("%%distributed -d 2 --monitor off --output all\nprint(__builtins__.seen())")
    assert shown.stdout.count("None") == 2
