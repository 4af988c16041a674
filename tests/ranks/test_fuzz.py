"""Random notebooks end as the same cells in one process do: same values, types, identities, after every cell."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given

from tests.fuzz.notebooks import EXAMPLES, SAMPLE, drawn, fuzz
from tests.fuzz.programs import Program, programs

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
    code = "from tests.fuzz.notebooks import fuzz; fuzz('-d 1 --start fork --monitor off', 4)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
