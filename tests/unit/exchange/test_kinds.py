"""Every kind of object: to the rank, at rest, edited there, home in place, at rest. The cases are in kinds.txt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sides import Sides, public

Case = dict[str, str]


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    text = (Path(__file__).parent / "kinds.txt").read_text()
    for block in f"\n{text}".split("\n== ")[1:]:
        title, body = block.split("\n", 1)
        cell, *parts = body.split("\n-- ")
        found[title] = {"cell": cell, **dict(part.split("\n", 1) for part in parts)}
    return found


CASES = cases()


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_there_and_back(sides: Sides, case: Case) -> None:
    sides.run(case["cell"])
    before = {name: sides.here[name] for name in public(sides.here)}
    sides.out()
    assert sides.unsent() == []
    assert sides.unsent_there() == []
    assert sides.there(case["there"].strip())

    sides.distributed(case["edit"])

    assert sides(case["home"].strip())
    assert sides.unsent() == []
    assert sides.unsent_there() == []
    assigned = {name for name in before if f"{name} = " in case["edit"]} | {*case.get("replaced", "").split()}
    assert [name for name in before if name not in assigned and sides.here[name] is not before[name]] == []
