"""docs/edits.md says what is so: a few of its lines are played under each strategy, and have what stands there."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain import registry
from tests.fuzz.common_edits import STRATEGIES, TABLE, entry, played
from tests.fuzz.edits_page import PAGE, read
from tests.fuzz.verdicts import Oracle

SEED = int(os.environ.get("SEED", "0"))
SAMPLE = 3
UNMENDED = 0
"""So many entries of the page say that something is wrong; this only goes down."""


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle() as found:
        yield found


@pytest.mark.sample("fsdp")
@pytest.mark.limit(300)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_page_says_what_is_so(name: str, oracle: Oracle) -> None:
    if not all(map(find_spec, registry.strategy(name.split()[0]).needs.packages)):
        pytest.skip(f"{name} is not installed")
    said = read(PAGE.read_text())
    drawn = tuple(random.Random(f"{SEED}/{name}").sample(TABLE, SAMPLE))
    found = {edit.words: entry(verdict) for edit, verdict in played(name, drawn, oracle)}
    assert found == {edit.words: said[edit.words][name] for edit in drawn}


def test_the_page_has_every_edit_under_every_strategy() -> None:
    said = read(PAGE.read_text())
    assert [*said] == [edit.words for edit in TABLE]
    assert all([*row] == [*STRATEGIES] for row in said.values())
    entries = [text for row in said.values() for text in row.values()]
    assert sum(text.startswith("**") for text in entries) <= UNMENDED


def test_every_program_is_one_that_one_process_runs(oracle: Oracle) -> None:
    for edit in TABLE:
        story = oracle.player.play(edit.program())
        assert story[-1].error is None, (edit.words, story[-1].error)
