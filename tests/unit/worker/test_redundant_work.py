"""Ranks that do the same work are told so, once a cell, and ranks whose batches differ never are; so is a cell that has
split its data by rank, and whose loader was shared out once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nbtrain.base.events import Finished
from nbtrain.notebook.report.cell_report import work_advice
from nbtrain.worker.data import split_datasets
from nbtrain.worker.gradients import redundant_work
from nbtrain.worker.gradients.redundant_work import RedundantWork
from nbtrain.worker.gradients.summed_losses import SummedLosses


def _looked(*batches: torch.Tensor, shared: bool = False) -> int | None:
    torch.manual_seed(0)
    model, look = torch.nn.Linear(4, 2), RedundantWork()
    look.begin(True)
    for x in batches:
        loss = model(x).square().mean()
        look.backward(loss)
        loss.backward()
        with torch.no_grad():
            model.weight.mul_(0.5)
    if shared:
        look.shared()
    return look.number()


X = torch.arange(8.0).reshape(2, 4)


def test_what_is_looked_at() -> None:
    assert _looked(X, X) == _looked(X, X) is not None
    assert _looked(X, X) != _looked(X, X + 1)
    assert _looked(X) is None
    assert _looked(X, X, shared=True) is None
    assert _looked(X, X, X, X) != _looked(X, X, X, X + 1)
    assert _looked(X, X, X) == _looked(X, X, X + 1), "the third is not looked at"


def test_losses_that_say_nothing_of_batches() -> None:
    for losses in ((0.0, 0.0), (1.0, 1.0), (float("nan"), float("nan")), (0.0, 1.0)):
        look = RedundantWork()
        look.begin(True)
        for loss in losses:
            look.backward(torch.tensor(loss, requires_grad=True))
        assert look.number() is None, losses


@pytest.mark.parametrize(("of", "method"), [(redundant_work, "_read"), (SummedLosses, "_look")])
def test_a_look_that_fails_is_no_failure_of_the_cell(monkeypatch: pytest.MonkeyPatch, of: Any, method: str) -> None:
    def fail(*args: object) -> None:
        raise TypeError("unsupported ScalarType")

    monkeypatch.setattr(of, method, fail)
    assert (_looked(X, X) is None) == (of is redundant_work)
    summed = SummedLosses()
    summed.begin(2)
    summed.look(torch.nn.Linear(4, 2)(X).sum(), 2, set())
    assert summed.notes() == [] or of is redundant_work


def _of(make: Callable[[], object]) -> int:
    return split_datasets.number(make())


def test_numbers_of_data_sets() -> None:
    assert _of(lambda: [1, 2]) == _of(lambda: [1, 2]) != _of(lambda: [1, 3])
    assert _of(lambda: torch.utils.data.TensorDataset(X)) != _of(lambda: torch.utils.data.TensorDataset(X[:1]))


def test_ranks_of_which_nothing_is_known_are_told_nothing() -> None:
    def ended(**numbers: int) -> Finished:
        return Finished(rank=0, time=0.0, steps=1, compared=numbers)

    assert work_advice([ended(work=1), ended(work=1)]).keys() == {"work"}
    assert work_advice([ended(work=1), ended()]) == {}
    assert work_advice([ended(work=1)]) == {}
    assert work_advice([ended(data=1), ended(data=2), ended(data=1)]).keys() == {"data"}
    assert work_advice([ended(data=1), ended()]) == {}
