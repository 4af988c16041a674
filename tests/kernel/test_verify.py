"""A cell against one process: what is found equal, what is not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from nbtrain.planning.compare.receipt import DIFFERS, EQUAL, Number, Receipt, WeightDifference
from nbtrain.session.trials.verify_cell import Played, compared, numbers
from nbtrain.specs import Record
from nbtrain.training.measure.step_record import StepRecord, as_number, contents, joined, rates
from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, TRAIN, Notebook

MORE = """
def with_(*layers):
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 2))
def state():
    return [p.sum().item() for p in model.parameters()], len(opt.state), torch.get_rng_state().sum().item()
"""


@pytest.fixture
def nb(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook(MORE)
    notebook(TRAIN)
    yield notebook
    notebook("%distributed stop")


def verdict(text: str) -> str:
    return next(line for line in text.splitlines() if line[:1] in "✓✗?" and line[1:2] == " ")


@pytest.mark.kernel
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "deepspeed_stage_3", "pipeline"])
def test_a_plain_loop_is_equal(nb: Notebook, strategy: str) -> None:
    found = nb("before = state()\n%distributed stop\n").text
    found = nb(f"%%distributed -d 2 -s {strategy} --verify --steps 3{LOOP}").text
    assert verdict(found).startswith("✓ equal"), found
    assert "96, each as often as in one process" in found or "48, each" in found
    assert "4 compared" in found, "all of the model's weights"
    assert nb("print(state() == before)").stdout == "True\n", "the notebook is as it was"


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("layers", "cause"),
    [
        ("nn.Dropout(0.4)", "dropout drops other units"),
        ("nn.BatchNorm1d(8)", "batch norm normalises each rank's own samples"),
    ],
)
def test_what_differs_as_it_has_to_is_named(nb: Notebook, layers: str, cause: str) -> None:
    nb(f"model = with_({layers}); opt = adamw(model)")
    found = nb(f"%%distributed -d 2 --verify --steps 3{LOOP}").text
    assert verdict(found).startswith("✗ differs")
    assert cause in found
    assert "both ways give the same weights" in found


@pytest.mark.kernel
def test_a_sum_over_the_batch(nb: Notebook) -> None:
    nb("opt = torch.optim.SGD(model.parameters(), 0.01)")  # Adam does not mind how large gradients are
    found = nb(
        f"%%distributed -d 2 --verify --steps 3{LOOP.replace('y)', 'y, reduction=chr(115) + chr(117) + chr(109))')}"
    )
    assert verdict(found.text).startswith("✗ differs")
    assert "the loss is a sum over the batch" in found.text


@pytest.mark.kernel
def test_a_loss_that_couples_the_samples_of_a_batch(nb: Notebook) -> None:
    """And batches that are no multiple of the ranks. The next cell finds ranks as it wants them."""
    nb("loader = DataLoader(TensorDataset(X[:71], Y[:71]), 16)")
    pairs = "F.normalize(model(x)) @ F.normalize(model(x)).T, torch.arange(len(x))"
    loop = LOOP.replace("model(x), y", pairs)
    found = nb(f"%%distributed -d 2 --verify --steps 3{loop}").text
    assert verdict(found).startswith("✗ differs")
    assert "the loss couples the samples of a batch" in found
    assert "of them twice" in found
    assert "drop_last=True" in found
    assert "new ranks" not in nb(f"%%distributed -d 2{loop}").text
    assert verdict(nb(f"%%distributed -d 2 -s ddp2 --verify --steps 3{loop}").text).startswith("✓ equal")
    assert "new ranks" not in nb("%%distributed -d 2\npass").text


@pytest.mark.kernel
def test_data_that_every_rank_sees(nb: Notebook) -> None:
    nb(
        "import itertools\nclass Stream(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n        return iter(list(zip(X, Y)))\n"
        "class Own(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n        return itertools.islice(iter(list(zip(X, Y))), rank, None, world_size)\n"
        "loader = DataLoader(Stream(), batch_size=16)"
    )
    found = nb(f"%%distributed -d 2 --verify --steps 3{LOOP}").text
    assert verdict(found).startswith("✗ differs")
    assert "all 2 ranks saw the same samples" in found
    assert "itertools.islice(data, rank, None, world_size)" in found
    nb("loader = DataLoader(Own(), batch_size=16)")
    assert verdict(nb(f"%%distributed -d 2 --verify --steps 3{LOOP}").text).startswith("✓ equal")


@pytest.mark.kernel
def test_noise_of_each_rank_is_no_rounding(nb: Notebook) -> None:
    noisy = LOOP.replace("model(x)", "model(x + torch.randn_like(x))")
    found = nb(f"%%distributed -d 2 --verify --steps 3{noisy}").text
    assert verdict(found).startswith("✗ differs")
    assert "random numbers" in found


@pytest.mark.kernel
def test_the_cell_that_was_run_last_and_one_by_its_number(nb: Notebook) -> None:
    nb(f"%%distributed -d 2 -s zero1{LOOP}")
    number = nb("len(In) - 2").text.strip()
    nb("%%distributed -d 2\nprint(rank)")
    assert "ddp on 2 ranks" in nb("%distributed verify").text
    found = nb(f"%distributed verify {number} --steps 2").text
    assert "zero1 on 2 ranks against one process · 2 steps of each" in found
    assert verdict(found).startswith("✓ equal")
    assert "is no %%distributed cell" in nb.refused("%distributed verify 1")
    assert "what is 'x'?" in nb.refused("%distributed verify x")
    failed = nb("%%distributed -d 2 --verify\nif rank: raise KeyError('here')\nloss = model(X).sum()")
    assert "KeyError" in failed.text
    assert "--strategy none" in nb.refused(f"%%distributed -d 2 -s none --verify{LOOP}")
    assert "different things" in nb.refused(f"%%distributed -d 2 --verify --find-batch{LOOP}")


# Without ranks


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
