"""Which epoch it is, and of how many, as the loop around says."""

from __future__ import annotations

import linecache
from types import SimpleNamespace
from typing import Any

import pytest
import tqdm.auto

from nbtrain.worker.data.loop_position import epoch_around


def played(cell: str, **names: Any) -> list[Any]:
    """What is found where the cell calls `look()`, which stands for `iter` of a loader."""
    name = "<nbtrain-test-cell>"
    linecache.cache[name] = len(cell), None, cell.splitlines(keepends=True), name
    found: list[Any] = []
    passing = {"tqdm": lambda over, **more: over, "resumable": lambda over: over, "trange": range, "iter": iter}
    try:
        exec(compile(cell, name, "exec"), {**passing, **names, "look": lambda: found.append(epoch_around(len(found)))})
    finally:
        del linecache.cache[name]
    return found


@pytest.mark.parametrize(("over", "count"), [
    ("range(3)", 3), ("range(2, 10, 3)", 3), ("range(epochs)", 7), ("range(epochs * 2)", None),
    ("range(cfg.epochs)", 5), ("range(table['epochs'])", 4), ("trange(4)", 4), ("tqdm(range(6), desc='e')", 6),
    ("resumable(range(epochs))", 7), ("numbers", 2), ("range(1 + len(table))", None), ("[0, 1]", None),
    ("enumerate(range(2))", None), ("own(2)", None), ("named", 4),
])  # fmt: skip
def test_what_a_loop_goes_over(over: str, count: int | None) -> None:
    names = {"epochs": 7, "cfg": SimpleNamespace(epochs=5), "table": {"epochs": 4}, "numbers": range(2), "own": range}
    names |= {"named": tqdm.auto.trange(4, disable=True)}
    twice = 2 * "        for x in look() or []: pass\n"
    found = played(f"if True:\n    for epoch in {over}:\n{twice}", **names)
    assert found
    assert found == ([one for index in range(count) for one in [(index, count)] * 2] if count else [None] * len(found))


def test_a_loader_s_own_loop_in_one_line_is_not_around_it() -> None:
    """The loader's `__iter__` is torch's, and no frame of the user's."""
    cell = "for e in range(2):\n    for x in look() or []: pass\n"
    assert played(cell) == [(0, 2), (1, 2)]


def test_in_a_function_and_where_a_run_goes_on() -> None:
    one = "def one():\n    for x in look() or []: pass\n"
    cell = f"{one}def fit(epochs):\n    for e in range(epochs):\n        one()\nfit(2)\n"
    assert played(cell) == [(0, 2), (1, 2)]
    assert played(
        "for e in resumable(range(9)):\n    for x in look() or []: pass\n", resumable=lambda over: over[7:]
    ) == [(7, 9), (8, 9)]


@pytest.mark.parametrize("cell", [
    "for fold in range(2):\n    for e in range(2):\n        for x in look() or []: pass\n",
    "for k in range(2):\n    def f():\n        for e in range(2):\n            for x in look() or []: 0\n    f()\n",
    "go = [1, 1]\nwhile go:\n    go.pop()\n    for e in range(2):\n        for x in look() or []: pass\n",
    "for x in look() or []: pass\nfor e in range(2): pass\nfor x in look() or []: pass\n",
    "for e in range(2):\n    e = 'a'\n    for x in look() or []: pass\n",
    "def range(n): return [5, 6]\nfor e in range(2):\n    for x in look() or []: pass\n",
])  # fmt: skip
def test_where_it_is_not_certain_nothing_is_said(cell: str) -> None:
    found = played(cell)
    assert found
    assert set(found) == {None}


def test_a_loop_around_iter_counts_epochs_if_the_loader_is_iterated_with_it() -> None:
    assert played("for epoch in range(3):\n    batches = look()\n") == [(0, 3), (1, 3), (2, 3)]
    steps = "batches = look()\nfor step in range(9):\n    if step % 4 == 3:\n        batches = look()\n"
    assert played(steps) == [None, None, None]
