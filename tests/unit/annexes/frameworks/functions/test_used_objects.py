"""What a call in a script may use is found as a cell's names would lead to it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.annexes.frameworks.functions.used_objects import used_objects

model = nn.Linear(2, 2)
held = {"nets": [model], "number": 3, "data": torch.ones(3)}


def reads() -> None:
    model(torch.ones(2))


def through_another() -> None:
    reads()


def in_a_function_of_its_own() -> None:
    [model(one) for one in ()]
    (lambda: model)()


def in_a_container() -> None:
    held["nets"]


def by_default(net: nn.Module = model) -> None:
    pass


class Fit:
    def __init__(self) -> None:
        self.model = model
        self.me = self

    def fit(self) -> None:
        pass


model_of_nobody = nn.Linear(1, 1)


class Named:
    def fit(self) -> None:
        self.model_of_nobody = 3


class Bare:
    def fit(self) -> None:
        self.helper()

    def helper(self) -> None:
        reads()

    def __call__(self) -> None:
        pass


def closes_over() -> Any:
    net = model
    return lambda: net


@pytest.mark.parametrize(("function", "args", "name"), [
    (reads, (), "model"),
    (through_another, (), "reads.model"),
    (in_a_function_of_its_own, (), "model"),
    (in_a_container, (), "held['nets'][0]"),
    (closes_over(), (), "net"),
    (Fit().fit, (), "self.model"),
    (Bare().fit, (), "self.helper.reads.model"),
    (Bare(), (), "helper.reads.model"),
    (functools.partial(print, model), (), "[0]"),
    (print, (model,), "args[0]"),
    (print, ({"a": [Fit()]},), "args[0]['a'][0].model"),
])  # fmt: skip
def test_a_model_is_found(function: Any, args: tuple[Any, ...], name: str) -> None:
    assert used_objects(function, args, {}) == {name: model}


def test_each_is_found_once_and_in_the_same_order() -> None:
    other = nn.Linear(1, 1)
    found = used_objects(Fit().fit, (model, other), {"other": other, "loader": None})
    assert list(found.items()) == [("args[0]", model), ("args[1]", other)]
    assert set(used_objects(by_default, (), {}).values()) == {model}


def test_what_is_not_used_is_not_found() -> None:
    assert not used_objects(print, (torch, 1, "a"), {"b": {model}})
    assert not used_objects(Named().fit, (), {}), "an attribute of that name is no global"
