"""How predictions of batches become one, and how a batch is given to a model."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from nbtrain.errors import UsageError
from nbtrain.functions.predict import call_model
from nbtrain.functions.predicted_rows import Ragged, as_frame, joined

Pair = namedtuple("Pair", "a b")


def test_parts_become_one_with_a_row_for_each_sample() -> None:
    parts = [
        {"x": torch.ones(2, 3), "y": (torch.zeros(2), ["a", "b"])},
        {"x": torch.ones(1, 3), "y": (torch.ones(1), ["c"])},
    ]
    found = joined(parts)
    assert found["x"].shape == (3, 3)
    assert found["y"][0].tolist() == [0, 0, 1]
    assert found["y"][1] == ["a", "b", "c"]
    assert joined([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
    assert joined([numpy.ones(2), numpy.zeros(1)]).tolist() == [1, 1, 0]
    pair = joined([Pair(torch.ones(1), 1), Pair(torch.ones(2), 2)])
    assert isinstance(pair, Pair)
    assert pair.a.shape == (3,)
    assert pair.b == [1, 2]
    assert joined([]) == []


def test_shapes_that_differ_are_said() -> None:
    with pytest.raises(Ragged, match="differ in their shapes"):
        joined([torch.ones(2, 3), torch.ones(2, 4)])


def test_columns_of_a_frame() -> None:
    frame = as_frame({"p": torch.ones(2, 2), "label": torch.zeros(2)})
    assert list(frame.columns) == ["p_0", "p_1", "label"]
    assert as_frame(torch.ones(3)).shape == (3,)
    with pytest.raises(UsageError, match="a tuple has none"):
        as_frame((torch.ones(2), torch.ones(2)))
    with pytest.raises(UsageError, match="is no row"):
        as_frame(torch.ones(2, 2, 2))


class Named(nn.Module):
    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return input_ids, attention_mask


class Two(nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        return x, y


@pytest.mark.parametrize(
    ("model", "batch", "wanted"),
    [
        (nn.Identity(), 3, 3),
        (nn.Identity(), (3, 4), 3),
        (Two(), [3, 4, 5], (3, 4)),
        (Named(), {"input_ids": 1, "labels": 2}, (1, None)),
        (Named(), {"attention_mask": 2, "input_ids": 1}, (1, 2)),
        (nn.Identity(), {"input": 3}, 3),
        (nn.Identity(), {"text": 3}, {"text": 3}),
    ],
)
def test_how_a_batch_is_given_to_a_model(model: nn.Module, batch: Any, wanted: Any) -> None:
    assert call_model(model, batch) == wanted
