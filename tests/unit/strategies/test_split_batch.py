"""What a model is called with and returns comes back in its own form, whatever its tensors are in."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from nbtrain.strategies.kit.batch_structure import flatten

SIZE = torch.Size([2, 3])


class Pair(NamedTuple):
    x: Any
    size: Any


@dataclass
class Batch:
    x: Any
    size: Any


@pytest.mark.parametrize("hold", [
    lambda x: (x, SIZE), lambda x: [x, SIZE], lambda x: {"x": x, "size": SIZE},
    lambda x: ((x, SIZE), {"size": SIZE}), lambda x: collections.OrderedDict(x=x, size=SIZE),
    lambda x: collections.deque([x, (x, SIZE)]), lambda x: Pair(x, SIZE), lambda x: Batch(x, [SIZE]),
], ids=["tuple", "list", "dict", "nested", "OrderedDict", "deque", "namedtuple", "dataclass"])  # fmt: skip
def test_form_keeps_types(hold: Any) -> None:
    """`model(x, y.shape)` gets a torch.Size and no tuple: torch itself would take it apart."""
    x = torch.ones(2, 3)
    tensors, form = flatten(hold(x))
    assert all(one is x for one in tensors)
    again = form.rebuild([torch.zeros(1)] * len(tensors))
    expected = hold(torch.zeros(1))
    assert _types(again) == _types(expected)


def _types(value: Any) -> Any:
    if isinstance(value, torch.Size | torch.Tensor):
        return type(value)
    if isinstance(value, Batch):
        return Batch, _types(value.x), _types(value.size)
    held = list(value.values()) if isinstance(value, dict) else list(value)
    return type(value), [_types(part) for part in held]
