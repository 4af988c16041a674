"""Ordinary training code runs unchanged but for the first line of the cells that train, and does what one process does.

Each file of tests/programs is a notebook in cells. It runs three times in a real kernel: plainly, under `single` (equal
to the last bit, random streams and identities included), and under `ddp` on two ranks that split each batch. What a
rank computes from its own part of a batch is the lead's then: losses in a history, sums over a loader. Programs say
below what of that kind they leave behind; all else has to be equal but for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import Kernel

HERE = Path(__file__).parents[1] / "programs"
OUTCOME = "__import__('tests.support.outcome').support.outcome"
"""What needs no name in the notebook."""
PLAIN, SINGLE = "", "%%distributed --strategy single"
DDP = "%%distributed --strategy ddp --devices 2 --split-batches"


PROGRAMS = {
    "digits": ("train_losses", "val_loss", "val_accurac", "best_loss", "curve"),
    "learner": ("learner.history['loss']", "plot['loss']"),
}
"""What is the lead's own under ddp, as it is computed from its parts of batches: beginnings of paths."""

STEEP = "]['"
"""Entries of an optimizer's state are near to gradients, in which rounding shows most: halves of a batch that one
process adds up differ as much."""


def cells(program: str) -> list[tuple[bool, str]]:
    """(whether it trains, its code) of every cell."""
    parts = (HERE / f"{program}.py").read_text().split("# %%")[1:]
    titled = [part.split("\n", 1) for part in parts]
    return [(title.strip() == "distributed", code.strip("\n")) for title, code in titled]


def run(kernel: Kernel, program: str, first_line: str) -> str:
    """All cells of the program from the top; what was shown."""
    kernel.run("%reset -f")
    shown = ""
    found = cells(program)
    kernel.run(found[0][1])  # modules draw random numbers when they are imported for the first time
    kernel.run("import random, numpy; random.seed(0); numpy.random.seed(0); torch.set_default_dtype(torch.float32)")
    kernel.run("%reset -f")
    for trains, code in found:
        text = f"{first_line}\n{code}" if trains and first_line else code
        result = kernel.run(text)
        shown += result.text
        assert result.error is None, f"{text}\n{result.text}"
    here = f"{OUTCOME}.kept[{program!r}, {first_line!r}] = {OUTCOME}.outcome(globals())"
    result = kernel.run(here)
    assert result.error is None, result.text
    return shown


def differences(kernel: Kernel, program: str, first_line: str, **options: object) -> list[str]:
    """Between this run of the program and the plain one."""
    runs = ", ".join(f"{OUTCOME}.kept[{program!r}, {line!r}]" for line in (PLAIN, first_line))
    shown = kernel.run(f"print(*{OUTCOME}.differences({runs}, **{options!r}), sep='\\n')")
    assert shown.error is None, shown.text
    return shown.stdout.strip().splitlines()


@pytest.fixture(scope="module")
def loaded(module_kernel: Kernel) -> Iterator[Kernel]:
    module_kernel.run("get_ipython().extension_manager.load_extension('nbtrain');")
    yield module_kernel
    assert module_kernel.run("%distributed stop").error is None


@pytest.fixture(scope="module")
def one_rank(loaded: Kernel) -> None:
    """The programs that run on it run there one after another; it is there before the first."""
    assert loaded.run(f"{SINGLE}\npass").error is None


@pytest.fixture(scope="module")
def two_ranks(loaded: Kernel) -> None:
    assert loaded.run(f"{DDP}\npass").error is None


@pytest.fixture
def notebook(loaded: Kernel) -> Iterator[Kernel]:
    yield loaded
    loaded.run("%reset -f")


@pytest.fixture(scope="module")
def plain() -> set[str]:
    """Programs that ran in one process already."""
    return set()


def once(notebook: Kernel, plain: set[str], program: str) -> None:
    if program not in plain:
        run(notebook, program, PLAIN)
        plain.add(program)


def test_every_program_is_run() -> None:
    assert {path.stem for path in HERE.glob("*.py")} == set(PROGRAMS)
    for program in PROGRAMS:
        assert sum(trains for trains, _ in cells(program)) >= 2, program


@pytest.mark.thorough
@pytest.mark.kernel
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("program", PROGRAMS)
def test_under_single_it_is_the_same_to_the_last_bit(notebook: Kernel, plain: set[str], program: str) -> None:
    once(notebook, plain, program)
    run(notebook, program, SINGLE)
    assert differences(notebook, program, SINGLE) == []


@pytest.mark.sample(first=1)
@pytest.mark.kernel
@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("program", PROGRAMS)
def test_under_ddp_it_is_the_same_but_for_rounding(notebook: Kernel, plain: set[str], program: str) -> None:
    once(notebook, plain, program)
    shown = run(notebook, program, DDP)
    assert "differs from rank 0" not in shown
    found = differences(notebook, program, DDP, tolerance=1e-4, steep=STEEP, own=PROGRAMS[program])
    assert found == []
