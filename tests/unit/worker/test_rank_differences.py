"""The number that tells whether a name holds the same on all ranks: it looks at anything, and never fails a cell."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch

from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.worker.home.rank_differences import number as numbered


def number(value: Any) -> int:
    return numbered(value, ObjectTable(0))


class Hides:
    __slots__ = ("a",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Pretends:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("none")


def nested() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def deep() -> list[Any]:
    found: list[Any] = []
    for _ in range(5000):
        found = [found]
    return found


MAKERS = [lambda: 2**20000, lambda: Fraction(2**20000, 3), Hides, Pretends, nested, deep, lambda: "\ud800"]


@pytest.mark.parametrize("make", MAKERS)
def test_what_cannot_be_looked_at_is_the_same(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hides, "__module__", "__main__")
    monkeypatch.setattr(Pretends, "__module__", "__main__")
    assert number([make(), 1]) == number([make(), 1]) != number([make(), 2])


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, True), (1, 1.0), (2**9000, 2**9000 + 1), ("x", b"x"), ([1], (1,)), ({1: 2}, {2: 1}), (None, ())]
    + [("a" * 3_000_000 + end, "a" * 3_000_000 + "y") for end in ("x", "")],
    ids=range(9),
)
def test_what_differs_has_another_number(a: Any, b: Any) -> None:
    assert number(a) != number(b)
    assert number([a]) != number([b])


def test_one_object_twice_is_what_two_equal_ones_are() -> None:
    inner = [1, 2]
    assert number([inner, inner]) == number([[1, 2], [1, 2]])
    inner.append(inner)  # type: ignore[arg-type]
    assert number(inner) == number(inner)


def test_attributes_of_the_notebooks_classes_are_looked_at_without_asking_them() -> None:
    asked: list[str] = []
    space: dict[str, Any] = {"__name__": "__main__", "asked": asked}
    exec("class C:\n    def __getattribute__(self, name):\n        asked.append(name)\n        raise KeyError", space)
    a, b = space["C"](), space["C"]()
    object.__getattribute__(a, "__dict__")["x"] = 1
    assert number(a) != number(b)
    assert not asked
