"""docs/edits.md says what is so: a few of its lines are played under each strategy, and have what stands there."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import pytest

from nbtrain.machine import registry
from tests.fuzz.common_edits import LINE, STRATEGIES, TABLE, CommonEdit, played
from tests.fuzz.edits_page import PAGE, read
from tests.fuzz.player import Player
from tests.fuzz.verdicts import Oracle, Verdict, judge
from tests.fuzz.whole_edits import IN_PLACE_OF, MORE, WITHOUT
from tests.support.pages import blocks

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
    found = {edit.words: text for edit, _, text in played(name, drawn, oracle)}
    assert found == {edit.words: said[edit.words][name] for edit in drawn}


@pytest.mark.sample("fsdp", "sharded")
@pytest.mark.limit(300)
@pytest.mark.parametrize("name", STRATEGIES)
def test_complete_tensors_are_those_of_one_process(name: str, oracle: Oracle) -> None:
    if not all(map(find_spec, registry.strategy(name.split()[0]).needs.packages)):
        pytest.skip(f"{name} is not installed")
    edits = (*MORE, *IN_PLACE_OF.values(), *WITHOUT)
    found = {edit.text: text for edit, _, text in played(name, edits, oracle)}
    assert found == dict.fromkeys(found, "right")


OWN = {
    name: "\n".join(block.text for block in blocks(PAGE.parent / "add_a_strategy.md") if f"class {name}(" in block.text)
    for name in ("TopK", "Shares")
}
LINES = {"TopK": 40, "Shares": 150}
FLAGS = {"TopK": "--fraction 1", "Shares": ""}


def own_strategy(name: str, edits: Sequence[CommonEdit], oracle: Oracle) -> dict[str, Verdict]:
    with Player(name, FLAGS[name]) as ranks:
        written = (False, "\n".join(dict.fromkeys([OWN["TopK"], OWN[name]])))
        programs = {edit.text: edit.program() for edit in edits}
        for cells in programs.values():
            cells.insert(1, written)
        return {text: judge(*oracle.recall(cells), ranks.play(cells)) for text, cells in programs.items()}


@pytest.mark.limit(900)
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("size", [SAMPLE, pytest.param(0, marks=pytest.mark.thorough)])
def test_the_strategies_of_the_docs_are_right_or_say_why_not(name: str, size: int, oracle: Oracle) -> None:
    """`Shares`, which is made of parts of nbtrain's own, is right, or names the line that is."""
    assert len([line for line in OWN[name].splitlines() if line.strip()]) <= LINES[name]
    every = [*TABLE, *MORE, *IN_PLACE_OF.values()]
    found = own_strategy(name, random.Random(f"{SEED}/{name}").sample(every, size or len(every)), oracle)
    assert {text: one for text, one in found.items() if one.word not in ("right", "refused")} == {}
    if name == "Shares":
        assert all(one.word == "right" or LINE in one.why for one in found.values())


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
