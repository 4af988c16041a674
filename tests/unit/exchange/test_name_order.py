"""The order of a notebook's names, and that a day's work in it does not make its cells dearer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbtrain.exchange.names.name_order import FEW, NameOrder
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.sync.captured_names import captured
from nbtrain.notebook.sync.notebook_side import NotebookSide
from tests.support.sides import Sides

DAY = 20_000


class Counted(dict[str, Any]):
    """Counts how many of its names somebody goes through."""

    steps = 0

    def __iter__(self) -> Iterator[str]:
        return self._each(super().__iter__())

    def __reversed__(self) -> Iterator[str]:
        return self._each(super().__reversed__())

    def items(self) -> Any:
        self.steps += len(self)
        return super().items()

    values = items  # nobody may need them

    def _each(self, names: Iterator[str]) -> Iterator[str]:
        for name in names:
            self.steps += 1
            yield name


def inputs(count: int) -> dict[str, str]:
    """What IPython keeps of so many cells."""
    return {f"_i{number}": "pass" for number in range(count)}


def test_names_stand_as_in_the_namespace_whatever_is_asked_for_and_whenever() -> None:
    dice = random.Random(3)
    namespace: dict[str, Any] = {}
    places = NameOrder(namespace)
    for number in range(600):
        for name in dice.sample(range(2_000), dice.randrange(4)):
            namespace[f"n{name}"] = number
        asked = {f"n{dice.randrange(2_000)}" for _ in range(dice.randrange(6))}
        assert places.ordered(asked) == [name for name in namespace if name in asked]


def test_gone_names_are_forgotten_and_those_bound_again_come_once() -> None:
    namespace: dict[str, Any] = {"model": 1, "opt": 2}
    places = NameOrder(namespace)
    for number in range(5 * FEW):
        namespace[f"fresh{number}"] = number
        assert places.ordered([f"fresh{number}", "opt", "model"]) == ["model", "opt", f"fresh{number}"]
        del namespace[f"fresh{number}"]
        assert places.ordered([f"fresh{number}", "opt"]) == ["opt"]
    assert len(places._places) <= FEW + 1
    del namespace["model"]
    namespace["model"] = 3
    assert sorted(places.ordered(["opt", "model"])) == ["model", "opt"]
    namespace.clear()
    assert places.ordered(["opt", "model"]) == []


@pytest.mark.parametrize("before", [0, 20, DAY])
def test_a_cell_costs_no_more_looks_after_twenty_thousand_others(before: int, tmp_path: Path) -> None:
    sides = Sides(tmp_path)
    sides.here = here = Counted(sides.here)
    sides.notebook_side = NotebookSide(here, str(tmp_path), range(1), {})
    places = NameOrder(here)

    def steps(code: str) -> int:
        """The way of a `%%distributed` cell, out and home, and what is looked at when the next cell ends."""
        here.steps = 0
        cell = Cell(source=code, code=code, filename="<cell>", first_line=1, number=1)
        names = captured(cell, here, places)
        sides.out([*names.hard, *names.soft])
        exec(code, sides.twins[0].namespace)
        sides.home()
        sides.notebook_side.release_dropped()
        return here.steps

    sides.run("model = [0]; n = 1\ndef step(): model[0] += n")
    here.update(inputs(before))
    steps("step()")  # the first finds out where the names are
    assert steps("step()") == 0
    assert here["model"] == [2]
    sides.run("model.append(5)")
    assert steps("step(); done = model[1]") == 0
    sides.run("lr = 0.1")
    here[f"_i{before}"] = "lr = 0.1"
    assert steps("step(); loss = lr") <= 4  # a new name is at the end
    assert (here["model"], here["done"], here["loss"]) == ([4, 5], 5, 0.1)
    sides.close()
