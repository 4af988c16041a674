"""Which model, optimizer and batch of a notebook a plan is made for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import nbtrain
from nbtrain.annexes.planning.profile.model_and_batch import find_model_and_batch, find_optimizer
from nbtrain.base.errors import UsageError
from tests.support.planned import mlp, mlp_batch

X, Y = mlp_batch(20)


def notebook(**more: Any) -> dict[str, Any]:
    model = mlp(8)
    return {"In": [], "_": mlp(999), "__name__": "__main__", "torch": torch, "model": model, "x": X, "y": Y, **more}


def test_the_only_model_its_optimizer_and_its_batch() -> None:
    mine = notebook()
    mine["opt"] = torch.optim.SGD(mine["model"].parameters())
    mine["other"] = torch.optim.SGD(nn.Linear(2, 2).parameters())
    found = find_model_and_batch(mine)
    assert (found.name, found.optimizer_name, found.batch_name, found.notes) == ("model", "opt", "x, y", ())
    assert found.model is mine["model"]
    assert found.optimizer is mine["opt"]
    assert found.batch[0] is X
    assert found.batch[1] is Y


def test_parts_losses_and_other_names_for_it_are_no_other_models() -> None:
    mine = notebook(loss=nn.CrossEntropyLoss(), frozen=nn.Linear(900, 900).requires_grad_(False))
    mine |= {"net": mine["model"], "head": mine["model"][-1], "layers": nn.ModuleList([mine["model"]])}
    found = find_model_and_batch(mine)
    assert (found.name, found.notes) == ("model", ())
    assert (found.optimizer, found.optimizer_name) == (None, "")


def test_the_largest_of_several_is_said() -> None:
    with nbtrain.empty():
        large = mlp(5000)
    found = find_model_and_batch(notebook(large=large))
    assert found.model is large
    assert "of large and model, large is planned" in found.notes[0]
    assert find_model_and_batch(notebook(large=large), "model").notes == ()


def test_the_optimizer_that_trains_most_of_it() -> None:
    mine = notebook()
    first, *rest = mine["model"].parameters()
    mine |= {"a": torch.optim.SGD([first]), "b": torch.optim.Adam(rest)}
    found = find_model_and_batch(mine)
    assert found.optimizer_name == "b"
    assert "b has 7 of the 8 weights of model" in found.notes[0]


class Picture(Dataset[Any]):
    """Draws random numbers, as augmentations do, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 50

    def __getitem__(self, at: int) -> Any:
        self.asked.append(at)
        return torch.randn(3) + random.random(), at % 2


def no_worker(_: int) -> None:
    raise AssertionError("a worker was started")


def test_a_batch_of_a_loader_without_going_through_it() -> None:
    pictures = Picture()
    generator = torch.Generator()
    own = generator.get_state()
    loader = DataLoader(
        pictures, batch_size=6, shuffle=True, num_workers=2, worker_init_fn=no_worker, generator=generator
    )
    mine = notebook(loader=loader)
    states = torch.get_rng_state(), random.getstate()
    found = find_model_and_batch(mine, batch="loader")
    assert [one.shape for one in found.batch] == [(6, 3), (6,)]
    assert pictures.asked == list(range(6))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(generator.get_state(), own)
    assert loader._iterator is None


def test_loaders_come_before_tensors_and_the_one_to_train_with_before_others() -> None:
    data = TensorDataset(X, Y)
    val, mine, train = (DataLoader(data, batch_size=size) for size in (2, 3, 4))
    assert find_model_and_batch(notebook(val_loader=val)).batch_name == "val_loader"
    assert find_model_and_batch(notebook(val_loader=val, mine=mine)).batch_name == "mine"
    found = find_model_and_batch(notebook(val_loader=val, mine=mine, train_dl=train))
    assert found.batch[0].shape == (4, 32)
    assert found.notes == ("batches come from train_dl, not from mine and val_loader",)


def test_loaders_whose_batches_are_made_elsewhere() -> None:
    data = TensorDataset(X, Y)
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), 5, False)
    batch = find_model_and_batch(notebook(dl=DataLoader(data, batch_sampler=sampler))).batch
    assert batch[0].shape == (5, 32)
    whole = find_model_and_batch(notebook(dl=DataLoader([(X, Y)], batch_size=None))).batch  # type: ignore[arg-type]
    assert whole[0].shape == (20, 32)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for i in range(100):
            yield torch.full((3,), float(i))


class Once(IterableDataset[Any]):
    def __init__(self) -> None:
        self.source = iter(range(100))

    def __iter__(self) -> Iterator[Any]:
        return map(float, self.source)


def test_streams_but_not_those_that_end_by_it() -> None:
    assert find_model_and_batch(notebook(dl=DataLoader(Stream(), batch_size=4))).batch.tolist() == [
        [float(i)] * 3 for i in range(4)
    ]
    once = Once()
    with pytest.raises(UsageError, match=r"the dataset of dl can be iterated only once.*--batch x"):
        find_model_and_batch(notebook(dl=DataLoader(once, batch_size=4)))
    assert next(once.source) == 0


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, at: int) -> Any:
        raise KeyError("no such file")


def test_what_to_write_instead_is_said() -> None:
    with pytest.raises(UsageError, match=r"samples of dl make no batch \(KeyError: 'no such file'\).*--batch x,y"):
        find_model_and_batch(notebook(dl=DataLoader(Broken())))
    with pytest.raises(UsageError, match="the notebook has no 'modle'; did you mean model"):
        find_model_and_batch(notebook(), "modle")
    with pytest.raises(UsageError, match="the notebook has no 'loader'; a batch could be x and y"):
        find_model_and_batch(notebook(), batch="loader")
    with pytest.raises(UsageError, match="x is a Tensor, not a model"):
        find_model_and_batch(notebook(), "x")
    with pytest.raises(UsageError, match="model is a Sequential, not a batch"):
        find_model_and_batch(notebook(), batch="model")
    bare = notebook()
    del bare["x"], bare["y"]
    with pytest.raises(UsageError, match=r"no batch found for model.*--batch x.*--batch loader"):
        find_model_and_batch(bare)
    with pytest.raises(UsageError, match="no model with trainable weights"):
        find_model_and_batch({"x": X, "loss": nn.MSELoss()})


def test_batches_by_name() -> None:
    mine = notebook(both=(X, Y), named={"x": X}, holder=nn.Module())
    mine["holder"].net = mlp(4)
    assert find_model_and_batch(mine, batch="both").batch == (X, Y)
    assert find_model_and_batch(mine, batch="named").batch == {"x": X}
    assert find_model_and_batch(mine, batch="x,y").batch == (X, Y)
    assert find_model_and_batch(mine, batch="x").batch is X
    assert find_model_and_batch(mine, "holder.net").model is mine["holder"].net


def test_an_optimizer_that_does_not_say_what_it_steps_is_not_taken() -> None:
    class Wraps(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner = inner

    mine = notebook()
    mine["opt"] = Wraps(torch.optim.SGD(mine["model"].parameters()))
    assert find_model_and_batch(mine).optimizer is None
    with pytest.raises(UsageError, match="opt, a Wraps, has no param_groups"):
        find_optimizer(mine, "opt")
