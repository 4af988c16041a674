"""Random notebooks end as the same cells in one process do: same values, types, identities, after every cell."""

from __future__ import annotations

import os
import warnings

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.form import difference, form_of
from tests.fuzz.programs import Program, programs
from tests.fuzz.sessions import Live, live

EXAMPLES = int(os.environ.get("EXAMPLES", "0"))
"""`make fuzz` asks for more than the seeded sample of `make verify`: so many on one rank, the others in proportion."""
SAMPLE = 120
SEED = int(os.environ.get("SEED", "0"))


def fuzz(options: str, examples: int) -> None:
    with live(options) as notebook:

        @drawn(-(-EXAMPLES * examples // SAMPLE) or examples)
        @given(programs())
        def same(program: Program) -> None:
            check(notebook, program)

        (seed(SEED)(same) if EXAMPLES else same)()


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


def drawn(examples: int) -> settings:
    return settings(
        max_examples=examples, deadline=None, derandomize=not EXAMPLES, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False,
    )  # fmt: skip
