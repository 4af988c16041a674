"""Ranks that do the same work are told so, once a cell, and ranks whose batches differ never are; so is a cell that has
split its data by rank, and whose loader was shared out once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from nbtrain.events import Finished
from nbtrain.session.report.rank_differences import compared
from nbtrain.training.data import split_datasets
from nbtrain.training.data.same_work import SameWork
from nbtrain.training.gradients.summed_losses import Summed
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

SAID = "ranks computed the same gradients"
STEP = "    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()\n"
SAME = {
    "the whole data": f"for _ in range(3):\n    x, y = X, Y\n{STEP}",
    "a generator of its own": (
        "g = torch.Generator().manual_seed(0)\nfor _ in range(3):\n"
        f"    i = torch.randint(96, (8,), generator=g); x, y = X[i], Y[i]\n{STEP}"
    ),
    "slices": f"for i in range(0, 64, 16):\n    x, y = X[i : i + 16], Y[i : i + 16]\n{STEP}",
    "a closure": (
        "search = torch.optim.LBFGS(model.parameters(), max_iter=3)\ndef closure():\n    search.zero_grad()\n"
        "    loss = F.cross_entropy(model(X), Y); loss.backward(); return loss\nsearch.step(closure)"
    ),
}
APART = {
    "a loader": f"for x, y in DataLoader(data, 16):\n{STEP}",
    "a loader of equal samples": f"for x, y in DataLoader(TensorDataset(X * 0 + 1, Y * 0), 16):\n{STEP}",
    "the ranks' own draws": f"for _ in range(4):\n    i = torch.randint(96, (8,)); x, y = X[i], Y[i]\n{STEP}",
    "a part each": f"for _ in range(3):\n    x, y = X[rank::world_size], Y[rank::world_size]\n{STEP}",
    "a penalty first": (
        "for _ in range(3):\n    x, y = X[rank::world_size], Y[rank::world_size]\n"
        f"    sum(p.square().sum() for p in model.parameters()).backward()\n{STEP}"
    ),
    "warming up alike": (
        f"for _ in range(4):\n    x, y = X, Y\n{STEP}"
        f"for _ in range(9):\n    x, y = X[rank::world_size], Y[rank::world_size]\n{STEP}"
    ),
    "a head of zeros": (  # the loss is log(2) for every batch, and the head's bias may have the same gradient
        "nn.init.zeros_(model[2].weight); nn.init.zeros_(model[2].bias)\nfor _ in range(2):\n"
        f"    x, y = X[rank::world_size], Y[rank::world_size]\n{STEP}"
    ),
    "one backward": f"x, y = X, Y\nfor _ in range(1):\n{STEP}",
    "gradients of zeros": "for _ in range(3):\n    (model(X[rank::2]).sum() * 0).backward(); opt.step()",
}  # fmt: skip


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook("model = net(); opt = torch.optim.SGD(model.parameters(), 0.1)")
    yield notebook
    notebook("%distributed stop")


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "sharded"])
def test_ranks_that_do_the_same_are_told_so(notebook: Notebook, strategy: str) -> None:
    same, apart = ({what: f"# {strategy}\n{code}" for what, code in one.items()} for one in (SAME, APART))
    for what, code in same.items():
        if what == "a closure" and strategy != "ddp":
            continue
        shown = notebook(f"%%distributed -s {strategy} -d 2\n{code}").text
        assert shown.count(SAID) == 1, f"{what}\n{shown}"
        assert "X[rank::world_size]" in shown
    assert SAID not in notebook(f"%%distributed -s {strategy} -d 2\n{same['slices']}").text, "once"
    for what, code in apart.items():
        if what == "a penalty first" and strategy == "fsdp":  # refused
            continue
        shown = notebook(f"%%distributed -s {strategy} -d 2\n{code}").text
        assert SAID not in shown, f"{what}\n{shown}"


def test_who_asks_for_the_same_batches_is_not_told(notebook: Notebook) -> None:
    for line in ("-s ddp -d 2 --no-sampler", "-s none -d 2", "-s single -d 1"):
        assert SAID not in notebook(f"%%distributed {line}\n{SAME['slices']}").text


def test_a_data_set_that_was_split_by_rank(notebook: Notebook) -> None:
    loop = f"for x, y in DataLoader(mine, 8):\n{STEP}"
    split = {
        "from torch.utils.data import Subset; mine = Subset(data, range(rank, 96, world_size))": True,
        "mine = TensorDataset(X[rank::world_size], Y[rank::world_size])": True,
        "mine = [(X[i], Y[i]) for i in range(rank, 96, world_size)]": True,
        "mine = TensorDataset(X[::2], Y[::2])": False,
        "mine = data; mine.rank = rank": False,
    }
    for line, told in split.items():
        shown = notebook(f"%%distributed -s ddp -d 2\n{line}\n{loop}").text
        assert ("--no-sampler" in shown) == told, f"{line}\n{shown}"
    first = next(iter(split))
    shown = notebook(
        f"%%distributed -s ddp -d 2 --no-sampler\nseen = 0\n{first}\n{loop}    seen += len(x)\nprint(seen)"
    )
    assert "48" in shown.stdout
    assert "split" not in shown.text


def _looked(*batches: torch.Tensor, shared: bool = False) -> int | None:
    torch.manual_seed(0)
    model, look = torch.nn.Linear(4, 2), SameWork()
    look.begin(True)
    for x in batches:
        loss = model(x).square().mean()
        look.backward(loss)
        loss.backward()
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


def test_a_long_loop_costs_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    add = SameWork._add
    monkeypatch.setattr(SameWork, "_add", lambda self, *tensors: looked.append(1) or add(self, *tensors))
    _looked(*[X] * 100)
    assert len(looked) == 2 * 7  # a loss and a gradient: the 1st, 2nd, 4th … 64th backward


@pytest.mark.parametrize(("of", "method"), [(SameWork, "_add"), (Summed, "_is_sum")])
def test_a_look_that_fails_is_no_failure_of_the_cell(monkeypatch: pytest.MonkeyPatch, of: type, method: str) -> None:
    def fail(*args: object) -> None:
        raise TypeError("unsupported ScalarType")

    monkeypatch.setattr(of, method, fail)
    assert (_looked(X, X) is None) == (of is SameWork)
    summed = Summed()
    summed.begin(2)
    summed.look(torch.nn.Linear(4, 2)(X).sum(), 2, set())
    assert summed.notes() == [] or of is SameWork


def _of(make: Callable[[], object]) -> int:
    return split_datasets.number(make())


def test_numbers_of_data_sets() -> None:
    assert _of(lambda: [1, 2]) == _of(lambda: [1, 2]) != _of(lambda: [1, 3])
    assert _of(lambda: torch.utils.data.TensorDataset(X)) != _of(lambda: torch.utils.data.TensorDataset(X[:1]))


def test_ranks_of_which_nothing_is_known_are_told_nothing() -> None:
    def ended(**numbers: int) -> Finished:
        return Finished(rank=0, time=0.0, steps=1, compared=numbers)

    assert compared([ended(work=1), ended(work=1)]).keys() == {"work"}
    assert compared([ended(work=1), ended()]) == {}
    assert compared([ended(work=1)]) == {}
    assert compared([ended(data=1), ended(data=2), ended(data=1)]).keys() == {"data"}
    assert compared([ended(data=1), ended()]) == {}
