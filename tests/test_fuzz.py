"""Random notebooks end as the same cells in one process do: same values, types, identities, after every cell."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.form import difference, form_of
from tests.fuzz.programs import Program, programs
from tests.fuzz.sessions import Live, live

EXAMPLES = int(os.environ.get("EXAMPLES", "0"))
"""`make fuzz` asks for more than the seeded sample of `make test`: so many on one rank, the others in proportion."""
SAMPLE = 120
SEED = int(os.environ.get("SEED", "0"))


def check(notebook: Live, program: Program) -> None:
    notebook.clear()
    for cell in program.cells:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = notebook.run(cell.text, cell.distributed)
        if type(error).__name__ == "NotPrepared" and "ddp" in notebook.options:
            return  # an optimizer made inside the cell, used without `setup`: the one refusal that a program may meet
        if cell.fails:
            assert error is not None, f"this cell should have failed:\n{cell.text}"
        else:
            assert error is None, f"{type(error).__name__}: {error}\nin\n{cell.text}\n{notebook.shown}"
        where = difference(cell.after, form_of(notebook.namespace))
        assert where is None, f"after\n{cell.text}\n{where}"


def fuzz(options: str, examples: int) -> None:
    with live(options) as notebook:

        @settings(
            max_examples=-(-EXAMPLES * examples // SAMPLE) or examples,
            deadline=None,
            derandomize=not EXAMPLES,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            report_multiple_bugs=False,
        )
        @given(programs())
        def same(program: Program) -> None:
            check(notebook, program)

        (seed(SEED)(same) if EXAMPLES else same)()


@pytest.mark.limit(14400)
@pytest.mark.parametrize(
    ("options", "examples"),
    [
        ("-d 1 -s none --monitor off", SAMPLE),
        ("-d 2 -s none --monitor off", 60),
        ("-d 2 -s ddp --monitor off", 40),
    ],
)
def test_a_random_notebook_ends_as_in_one_process(options: str, examples: int) -> None:
    fuzz(options, examples)


@pytest.mark.limit(14400)
def test_with_forks_of_a_notebook() -> None:
    """In a process of its own: what other tests ran here has left threads of torch's, with which nobody may fork."""
    code = "from tests.test_fuzz import fuzz; fuzz('-d 1 --start fork --monitor off', 4)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
