"""Random notebooks end as the same cells in one process do: same values, types, identities, after every cell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.form import difference, form_of
from tests.fuzz.programs import Program, programs
from tests.fuzz.sessions import Live, live

EXAMPLES = int(os.environ.get("EXAMPLES", "0"))
"""`make fuzz` asks for more than the seeded sample of `make verify`: so many on one rank, the others in proportion."""
SAMPLE = 120
SEED = int(os.environ.get("SEED", "0"))
LIMIT = 14400 if EXAMPLES else 600

MEANT = {
    "nesting": r"\{'k': \[|\[\[",
    "redefinition": r"^class (\w+).*^class \1\b",
    "deletion": r"^ *del \w+$",
    "shadowing": r"^ *(list|sum|device|log|rank) = ",
    "aliases": r"^ *([a-p]) = [a-p]$",
    "views": r"\[1:\]|\[2:[46]\]|\.T\b|\.reshape\(-1\)",
    "memory of arrays and tensors": r"from_numpy|\.numpy\(\)",
    "cycles": r"\b(\w+)\['self'\] = \1|\b(\w+)\.(append\(|right = |y = )\2\b",
    "shared tensors": r"\.weight = [\w.]+\.weight",
    "slots": "__slots__",
    "weak references": r"= weakref\.\w+\(",
    "a cell that fails": "raise ValueError",
}
"""What has to be in some programs of the sample, as they are typed."""


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
        max_examples=examples,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        report_multiple_bugs=False,
    )


def fuzz(options: str, examples: int) -> None:
    with live(options) as notebook:

        @drawn(-(-EXAMPLES * examples // SAMPLE) or examples)
        @given(programs())
        def same(program: Program) -> None:
            check(notebook, program)

        (seed(SEED)(same) if EXAMPLES else same)()


def test_the_sample_has_what_it_is_for() -> None:
    found: Counter[str] = Counter()

    @drawn(SAMPLE)
    @given(programs())
    def count(program: Program) -> None:
        if any(cell.distributed for cell in program.cells):
            found.update(name for name, pattern in MEANT.items() if re.search(pattern, repr(program), re.M | re.S))

    count()
    assert [name for name in MEANT if found[name] < 3] == [], found


@pytest.mark.sample("-d 2 -s ddp*")
@pytest.mark.limit(LIMIT)
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


@pytest.mark.thorough
@pytest.mark.limit(LIMIT)
def test_with_forks_of_a_notebook() -> None:
    """In a process of its own: what other tests ran here has left threads of torch's, with which nobody may fork."""
    code = "from tests.ranks.test_fuzz import fuzz; fuzz('-d 1 --start fork --monitor off', 4)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
