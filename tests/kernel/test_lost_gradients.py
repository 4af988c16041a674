"""Gradients wait on the ranks for a later cell. Where they are gone by then, a cell that steps without them says so."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain.machine import registry
from tests.support.absent import absent
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

MODEL = """
model = net(); opt = torch.optim.SGD(model.parameters(), 1.0)
was = [p.detach().clone() for p in model.parameters()]
"""
BACKWARD = "F.cross_entropy(model(X), Y).backward()"
MOVED = "any(not torch.equal(a, b) for a, b in zip(was, model.parameters()))"
SAID = "stepped without gradients that an earlier cell had left on the ranks"


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    made(MODEL)
    yield made
    made("%distributed stop")


def line(strategy: str = "ddp", devices: int = 2) -> str:
    return f"%%distributed -s {strategy} --devices {1 if strategy == 'single' else devices} --monitor off\n"


FAILS = ["single", "ddp", "fsdp", "deepspeed", "pipeline"]


@pytest.mark.sample("ddp")
@pytest.mark.parametrize("strategy", FAILS)
def test_after_a_cell_that_failed(notebook: Notebook, strategy: str) -> None:
    for package in registry.strategy(strategy).needs.packages:
        if not find_spec(package):
            absent(f"{package} is not installed", f"pip install {package}")
    notebook(line(strategy) + BACKWARD)
    notebook.fails(line(strategy) + "1/0")
    assert SAID in notebook(line(strategy) + "model; opt.step()").text
    assert SAID not in notebook(line(strategy) + "model; opt.step()").text


@pytest.mark.parametrize(
    "between",
    ["%distributed stop", line("zero1"), line("ddp", 1), "%distributed restart"],
    ids=["stop", "another strategy", "other devices", "restart"],
)
def test_after_what_ends_ranks_or_their_strategy(notebook: Notebook, between: str) -> None:
    """They are there, and the model moves, or it is said that they are not."""
    notebook(line("fsdp") + BACKWARD)
    notebook(between + ("model" if between.startswith("%%") else ""))
    said = SAID in notebook(line() + "opt.step()").text
    moved = "True" in notebook(f"print({MOVED})").stdout
    assert said != moved


def test_they_are_missed_by_a_step_that_adds_to_them(notebook: Notebook) -> None:
    notebook(line() + BACKWARD)
    notebook.fails(line() + "1/0")
    assert SAID not in notebook(line() + "print(len(was))").text
    assert SAID not in notebook(line() + BACKWARD).text
    assert SAID in notebook(line() + "opt.step()").text


def test_nobody_misses_what_is_cleared_or_made_anew(notebook: Notebook) -> None:
    for first in ("opt.zero_grad()", "model.zero_grad()"):
        notebook(line() + BACKWARD)
        notebook.fails(line() + "1/0")
        assert SAID not in notebook(f"{line()}{first}; {BACKWARD}; opt.step()").text
    notebook.fails(line() + "1/0")
    notebook(MODEL)
    assert SAID not in notebook(f"{line()}{BACKWARD}; opt.step()").text
    notebook(f"{line()}{BACKWARD}; opt.step(); opt.zero_grad()")
    notebook.fails(line() + "1/0")
    assert SAID not in notebook(f"{line()}{BACKWARD}; opt.step()").text


def test_without_a_failure_they_are_there(notebook: Notebook) -> None:
    notebook(line() + BACKWARD)
    assert SAID not in notebook(line() + "opt.step()").text
    assert "True" in notebook(f"print({MOVED})").stdout


def test_a_closure_clears_them_by_itself(notebook: Notebook) -> None:
    closure = "def closure():\n    opt.zero_grad(); loss = F.cross_entropy(model(X), Y); loss.backward(); return loss\n"
    notebook("opt = torch.optim.LBFGS(model.parameters(), max_iter=2)")
    notebook(line() + closure + "opt.step(closure);")
    notebook.fails(line() + "1/0")
    assert SAID not in notebook(line() + closure + "opt.step(closure);").text


def test_of_a_stage_that_the_first_rank_does_not_have(notebook: Notebook) -> None:
    notebook("opt = torch.optim.SGD(model[2].parameters(), 1.0); model[0].requires_grad_(False);")
    notebook(line("pipeline") + BACKWARD)
    notebook.fails(line("pipeline") + "1/0")
    assert SAID in notebook(line("pipeline") + "model; opt.step()").text


@pytest.mark.thorough
def test_what_a_handle_holds_keeps_them(notebook: Notebook) -> None:
    notebook(f"{line()[:-1]} --keep held\nclass Held: pass\nheld = Held(); held.model = model\n{BACKWARD}")
    notebook.fails(line() + "1/0")
    said = SAID in notebook(line() + "held; model; opt.step()").text
    assert said != ("True" in notebook(f"print({MOVED})").stdout)
