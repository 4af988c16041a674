"""How the numbers of a cell are compared with those of one process, and what the receipt says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from nbtrain.annexes.planning.compare.receipt import DIFFERS, EQUAL, Number, Receipt, WeightDifference
from nbtrain.annexes.planning.trials.verify_cell import Played, compared, numbers
from nbtrain.base.specs import Record
from nbtrain.worker.batches import contents, joined
from nbtrain.worker.measure.step_record import StepRecord, as_number, rates


def played(weights: dict[str, torch.Tensor], before: dict[str, torch.Tensor], *held: dict[str, float]) -> Played:
    return Played(tuple({"numbers": one, "samples": [], "losses": []} for one in held or ({},)), weights, before, 1)


def test_a_weight_is_equal_to_so_much_of_what_the_steps_moved_it() -> None:
    zero, one = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    off = {"w": torch.tensor([1.0, 1.0, 1.001])}
    (same,) = compared(played(one, {}), played(one, zero))
    (other,) = compared(played(off, {}), played(one, zero))
    assert same.equal
    assert not other.equal
    assert other.moved == 1.0
    (explained,) = compared(played(off, {}), played(one, zero), played({"w": torch.tensor([1.0, 1.0, 0.999])}, {}))
    assert explained.equal, "the same process differs by as much when its samples come in another order"
    (lost,) = compared(played({"w": torch.full((3,), torch.nan)}, {}), played(one, zero))
    assert not lost.equal
    (missing,) = compared(played({}, {}), played(one, zero))
    assert not missing.equal
    (counted,) = compared(played({"n": torch.tensor(3)}, {}), played({"n": torch.tensor(4)}, {"n": torch.tensor(0)}))
    assert not counted.equal


def test_numbers_of_each_rank_that_make_up_one_process_s() -> None:
    many = played(
        {},
        {},
        {"right": 3.0, "mean": 1.0, "same": 5.0, "odd": 1.0},
        {"right": 4.0, "mean": 2.0, "same": 5.0, "odd": 9.0},
    )
    one = played({}, {}, {"right": 7.0, "mean": 1.5, "same": 5.0, "odd": 100.0})
    assert [(number.name, number.how) for number in numbers(many, one)] == [("right", "sum"), ("mean", "mean")]


def test_the_receipt_says_which_weights_differ() -> None:
    wrong = WeightDifference(name="model.0.weight", difference=0.5, moved=0.1, allowed=1e-6)
    receipt = Receipt(
        line="-s ddp", strategy="ddp", ranks=2, steps=3, state=DIFFERS, samples="96", losses=((1.0, 2.0),),
        weights=(wrong,), numbers=(Number(name="right", ranks=(3.0, 4.0), alone=7.0, how="sum"),), causes=("because",),
    )  # fmt: skip
    for said in (repr(receipt), receipt._repr_html_()):
        assert "model.0.weight" in said
        assert "differs" in said
        assert "because" in said
        assert "reduce(right" in said
    assert "✓ equal" in repr(Receipt(line="", state=EQUAL))
    assert repr(Receipt(line="", strategy="ddp", doing="playing it")).endswith("… playing it")


def test_batches_are_joined_at_whatever_depth() -> None:
    a = {"x": [torch.ones(2, 3), torch.tensor([1, 2])], "names": ["a", "b"], "k": torch.tensor(1.0)}
    b = {"x": [torch.zeros(1, 3), torch.tensor([3])], "names": ["c"], "k": torch.tensor(2.0)}
    found = joined([a, b])
    assert found["x"][0].shape == (3, 3)
    assert found["x"][1].tolist() == [1, 2, 3]
    assert found["names"] == ["a", "b", "c"]
    assert found["k"].tolist() == [1.0, 2.0]
    assert joined([a]) is a


def test_a_sample_is_known_by_all_of_its_content() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
    names = contents([x, y])
    assert len(set(names)) == 3
    assert contents([x[1:], y[1:]]) == names[1:]
    assert contents([x, y.flip(0)])[0] != names[0]


def test_every_kind_of_dropout_is_switched_off(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_drop = 0.1
            self.norm = nn.BatchNorm1d(2)
            self.lstm = nn.LSTM(2, 2, 2, dropout=0.3)
            self.drop = nn.Dropout(0.2)

    model = Attention()
    record = StepRecord(Record(folder=str(tmp_path), without=("dropout", "batch norm")), 0, lambda: {"model": model})
    record.begin()
    assert not any(rates(module) for module in model.modules())
    model.train()
    assert not model.norm.training
    assert model.drop.training


@pytest.mark.parametrize(
    ("value", "number"),
    [(3, 3.0), (2.5, 2.5), (torch.tensor(4), 4.0), (torch.ones(2), None), (True, None), ("3", None), (None, None)],
)
def test_what_counts_as_a_number(value: object, number: float | None) -> None:
    assert as_number(value) == number
