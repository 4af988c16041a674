"""How predictions of batches become one, and how a batch is given to a model."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from nbtrain.annexes.frameworks.functions.predicted_rows import Ragged, as_frame, check_batch, joined, whole
from nbtrain.annexes.frameworks.functions.prediction_step import PredictionStep, call_model, kept
from nbtrain.base.errors import UsageError

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


@pytest.mark.parametrize(("model", "batch", "wanted"), [
    (nn.Identity(), 3, 3),
    (nn.Identity(), (3, 4), 3),
    (Two(), [3, 4, 5], (3, 4)),
    (Named(), {"input_ids": 1, "labels": 2}, (1, None)),
    (Named(), {"attention_mask": 2, "input_ids": 1}, (1, 2)),
    (nn.Identity(), {"input": 3}, 3),
    (nn.Identity(), {"text": 3}, {"text": 3}),
])  # fmt: skip
def test_how_a_batch_is_given_to_a_model(model: nn.Module, batch: Any, wanted: Any) -> None:
    assert call_model(model, batch) == wanted


class Takes(nn.Module):
    def forward(self, x: Any, mask: Any) -> Any:
        return x


class Shape(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.shape


@pytest.mark.parametrize(("model", "batch", "wanted"), [
    (nn.Linear(2, 2), {"pixel": 1, "label": 2}, "a batch has 'pixel', 'label', and forward of Linear takes input; "),
    (Shape(), {"pixel": 1}, r"it raises AttributeError.*lambda model, batch: model\(batch\['pixel'\]\)"),
    (Takes(), {"x": 1, "label": 2}, "a batch has 'x', 'label', and forward of Takes takes x, mask"),
    (Takes(), {"a": 1, "b": 2}, "forward of Takes takes x, mask"),
    (Takes(), (1,), "a batch has 1 parts, and forward of Takes takes x, mask"),
])  # fmt: skip
def test_a_batch_that_does_not_fit_is_said_in_a_sentence(model: nn.Module, batch: Any, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        call_model(model, batch)


class Cache:
    """As transformers has them."""


class Caching(nn.Module):
    def forward(self, input_ids: Any, labels: Any = None, use_cache: bool = True) -> Any:
        found = {"loss": input_ids.float().mean(), "logits": input_ids * 2.0}
        return found | ({"past_key_values": Cache()} if use_cache else {"said": "without"})


def test_what_a_model_gives_besides_rows_is_left_out() -> None:
    batch = {"input_ids": torch.ones(3, 2), "labels": torch.ones(3)}
    assert list(PredictionStep(None, as_rows=True)(Caching(), batch)) == ["logits"]
    assert list(PredictionStep(None, as_rows=False)(Caching(), batch)) == ["loss", "logits", "said"], "called without"
    assert list(kept(Caching()(torch.ones(3, 2)))) == ["loss", "logits"]
    loss = {"loss": torch.tensor(1.0)}
    assert kept(loss, rows_alone=True) is loss
    rows = PredictionStep(lambda model, batch: {"a": torch.ones(3), "past_key_values": Cache()}, as_rows=True)
    assert list(rows(None, batch)) == ["a"]


class Predicts(nn.Module):
    """As one of Lightning's does."""

    def predict_step(self, batch: Any) -> Any:
        return batch


def test_one_value_of_a_batch_beside_rows_is_said() -> None:
    both = {"loss": torch.tensor(1.0), "p": torch.ones(3, 2)}
    wanted = "'loss' of a prediction is one value for a whole batch, and 'p' has a row for each sample"
    with pytest.raises(UsageError, match=wanted):
        PredictionStep(lambda model, batch: both, as_rows=True)(None, None)
    assert PredictionStep(lambda model, batch: both, as_rows=False)(None, None) is both
    with pytest.raises(UsageError, match="part 1 of a prediction is one value"):
        check_batch((torch.ones(3), 1.5))
    check_batch({"loss": torch.tensor(1.0), "p": torch.ones(1, 2)})
    with pytest.raises(UsageError, match=wanted):
        PredictionStep(None, as_rows=True)(Predicts(), both)
    singles = [{"loss": torch.tensor(float(at)), "p": torch.ones(1) * at} for at in (2, 0, 1)]
    found, in_order = whole(singles, torch.tensor([2, 0, 1]))
    assert (found["loss"].tolist(), found["p"].tolist(), in_order) == ([0, 1, 2], [0, 1, 2], True)
    with pytest.raises(UsageError, match="'p' has 2 rows, and 'q' 3"):
        as_frame({"p": torch.ones(2), "q": torch.ones(3)})
