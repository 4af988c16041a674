"""docs/edits.md says what is so: a few of its lines are played under each strategy, and have what stands there."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain import registry
from tests.fuzz.common_edits import STRATEGIES, TABLE, entry, played
from tests.fuzz.edits_page import PAGE, page, read
from tests.fuzz.verdicts import Oracle, Verdict

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


def test_a_page_is_read_as_it_was_written() -> None:
    sentence = r"not under pipeline: write --strategy ddp \| or not"
    entries = {edit.words: dict.fromkeys(STRATEGIES, "right") for edit in TABLE}
    entries[TABLE[3].words]["pipeline"] = entries[TABLE[5].words]["fsdp"] = sentence
    assert read(page(entries)) == entries
    assert page(entries).count(sentence) == 1


def test_every_program_is_one_that_one_process_runs(oracle: Oracle) -> None:
    for edit in TABLE:
        story = oracle.player.play(edit.program())
        assert story[-1].error is None, (edit.words, story[-1].error)


def test_an_entry() -> None:
    assert entry(Verdict("right")) == "right"
    assert entry(Verdict("refused", "NotSupported: fsdp: write -s ddp")) == "fsdp: write -s ddp"
    assert entry(Verdict("wrong", "model.0.weight is off by 0.1")) == "**wrong**: other numbers, no word"
    assert entry(Verdict("wrong", "a bare error: KeyError: 1405")) == "**wrong**: raises KeyError, no sentence"
