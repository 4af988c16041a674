"""How many epochs a cell says that there will be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from nbtrain.training.loop.outer_loop import items_around, outer_loop

NAMES = {"epochs": 7, "cfg": SimpleNamespace(epochs=5, rate=0.1), "seeds": [3, 1, 4], "zero": 0, "flag": True}


@pytest.mark.parametrize(
    ("over", "items"),
    [
        ("range(60)", 60), ("range(2, 10, 3)", 3), ("range(epochs)", 7), ("range(epochs * 2 + 1)", 15),
        ("range(cfg.epochs)", 5), ("trange(4)", 4), ("tqdm(range(6), desc='e')", 6), ("tqdm.tqdm(range(6))", 6),
        ("resumable(range(epochs // 2))", 3), ("enumerate(seeds)", 3), ("seeds", 3), ("[1, 2]", 2), ("(1, 2, 3)", 3),
        ("range(unknown)", None), ("range(cfg.rate)", None), ("range(epochs // zero)", None), ("range(flag)", None),
        ("range(1, 5, zero)", None), ("zip(seeds)", None), ("make()", None), ("[*seeds]", None), ("iter(seeds)", None),
        ("range()", None), ("cfg.epochs", None), ("itertools.count()", None),
    ],
)  # fmt: skip
def test_what_a_loop_goes_over(over: str, items: int | None) -> None:
    cell = f"import x\nwith y:\n    for epoch in {over}:\n        for x in loader:\n            pass\n"
    assert items_around(cell, 4, NAMES) == items


def test_the_loader_s_own_loop_is_none_and_the_loop_that_is_under_way_counts() -> None:
    first, second = "for x in loader:\n    pass\n", "for a in range(3):\n    for x in loader: pass\n"
    cell = first + second + "for b in range(4):\n    f(loader)\n"
    assert [items_around(cell, line, {}) for line in range(1, 7)] == [None, None, None, 3, None, 4]
    assert items_around("for (", 1, {}) is None


def test_the_line_is_that_of_the_cell() -> None:
    names = {"outer_loop": outer_loop, "found": []}
    names["names"] = names
    cell = "def f():\n    found.append(outer_loop(code, names))\nfor e in range(9):\n    f()\n"
    names["code"] = cell
    exec(compile(cell, "<cell>", "exec"), names)
    assert names["found"] == [9] * 9
    assert outer_loop(cell, {}) is None
