"""A loop that was cut short goes on where it was, in the middle of an epoch, and the numbers are those of a training
that never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.strategies.ddp import DDP
from nbtrain.strategies.single import Single
from nbtrain.worker.checkpoints import api
from nbtrain.worker.checkpoints.api import resumable
from tests.support.bench import cell
from tests.support.ranks import run_on_ranks, without_group

SAMPLES, BATCH, EPOCHS = 48, 2, 3
SPEC = RunSpec(pool=PoolSpec())
Seen = list[tuple[int, list[int]]]
"""(epoch, the samples of a batch)"""


class WithDropout(nn.Module):
    """Draws random numbers when it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 16)
        self.drop = nn.Dropout(0.5)
        self.outer = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.drop(self.inner(x)))
        return out


def make(workers: int = 0, generator: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = WithDropout()
    data = TensorDataset(torch.arange(SAMPLES), torch.randn(SAMPLES, 3))
    drawn = torch.Generator().manual_seed(5) if generator else None
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0, generator=drawn)
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), loader


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: Any,
    *,
    stop: tuple[int, int] | None = None,
    save: str | None = None,
) -> Seen:
    """`stop`: after this batch of this epoch, where it is saved."""
    seen: Seen = []
    for epoch in resumable(range(EPOCHS)):
        for number, (index, x) in enumerate(loader):
            seen.append((epoch, index.tolist()))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if stop == (epoch, number):
                api.save(save)
                return seen
    return seen


def _whole(rank: int, world: int, **kind: Any) -> tuple[Seen, list[float]]:
    model, optimizer, loader = make(**kind)
    with cell(rank, world, strategy(world), SPEC, model=model, optimizer=optimizer, loader=loader):
        seen = train(model, optimizer, loader)
        return seen, model.outer.weight.flatten().tolist()


def _first(rank: int, world: int, path: str, stop: tuple[int, int], **kind: Any) -> Seen:
    model, optimizer, loader = make(**kind)
    with cell(rank, world, strategy(world), SPEC, model=model, optimizer=optimizer, loader=loader):
        return train(model, optimizer, loader, stop=stop, save=path)


def _second(rank: int, world: int, path: str, **kind: Any) -> tuple[Seen, list[float]]:
    model, optimizer, loader = make(**kind)
    torch.manual_seed(99)  # another process
    with cell(rank, world, strategy(world), SPEC, model=model, optimizer=optimizer, loader=loader):
        api.load(path)
        seen = train(model, optimizer, loader)
        return seen, model.outer.weight.flatten().tolist()


def strategy(world: int) -> Any:
    return Single(Single.Options()) if world == 1 else DDP(DDP.Options())


def on(world: int, function: Any, *args: Any, **kind: Any) -> list[Any]:
    if world == 1:
        return run_on_ranks(without_group, _with(function, kind), world, *args, world_size=1)
    return run_on_ranks(_with(function, kind), world, *args, world_size=world)


def _with(function: Any, kind: dict[str, Any]) -> Any:
    return lambda rank, *args: function(rank, *args, **kind)


@pytest.mark.parametrize("kind", [{}, {"workers": 1}, {"generator": True}], ids=["plain", "workers", "generator"])
@pytest.mark.parametrize("world", [1, 2])
def test_in_the_middle_of_an_epoch(world: int, kind: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    whole = on(world, _whole, **kind)
    first = on(world, _first, path, (1, 4), **kind)
    second = on(world, _second, path, **kind)
    for (seen, weights), before, (after, gone_on) in zip(whole, first, second, strict=True):
        assert len(before) == SAMPLES // BATCH // world + 5
        assert before + after == seen  # every batch once, in the very same order
        assert gone_on == pytest.approx(weights, rel=1e-5)  # with the same dropout


@pytest.mark.parametrize(("saved", "loaded"), [(2, 3), (3, 2), (1, 2), (2, 1)])
def test_on_another_number_of_ranks(saved: int, loaded: int, tmp_path: Path) -> None:
    """No sample of the epoch is seen twice, and none is left out."""
    path = str(tmp_path / "a")
    first = on(saved, _first, path, (1, 3))
    second = on(loaded, _second, path)
    samples = [i for rank in first for epoch, batch in rank if epoch == 1 for i in batch]
    rest = [i for rank, _ in second for epoch, batch in rank if epoch == 1 for i in batch]
    assert len(samples) == 4 * BATCH * saved
    assert set(samples) | set(rest) == set(range(SAMPLES))
    padding = len(samples) + len(rest) - SAMPLES
    assert 0 <= padding < BATCH * loaded
    assert {epoch for rank, _ in second for epoch, _ in rank} == {1, 2}


@pytest.fixture
def single() -> Iterator[Any]:
    """Cells on one rank in this process."""

    def run(body: Any, spec: RunSpec = SPEC, **objects: Any) -> Any:
        with cell(0, 1, Single(Single.Options()), spec, **objects):
            return body()

    yield run
    api._plain = api._resume = None


def test_saved_between_two_epochs(single: Any, tmp_path: Path) -> None:
    """`save` last in the body: the epoch counts as done. By itself, at a step's end, it does not: the body goes on."""
    for every, (epoch, rest) in {None: (1, []), 24: (0, ["rest 0"])}.items():
        path = tmp_path / str(every)
        model, optimizer, loader = make()
        trail: list[Any] = []

        def body(
            until: int = 1,
            model: Any = model,
            optimizer: Any = optimizer,
            loader: Any = loader,
            trail: Any = trail,
            path: Path = path,
            every: Any = every,
        ) -> None:
            for epoch in resumable(range(2)):
                trail.append(epoch)
                for _, x in loader:
                    trail.append("batch")
                    model(x).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                trail.append(f"rest {epoch}")
                if every is None:
                    api.save(path)
                if until == 1:
                    return

        spec = RunSpec(pool=PoolSpec(), save_steps=every, save_to=str(path))
        objects = {"model": model, "optimizer": optimizer, "loader": loader}
        single(body, spec, **objects)
        trail.clear()

        def again(body: Any = body, path: Path = path) -> None:
            api.load(path)
            body(2)

        single(again, **objects)
        assert trail[: 1 + len(rest)] == [epoch, *rest]
        assert trail.count("batch") == SAMPLES // BATCH


def test_loops_in_loops_and_loops_that_are_over(single: Any, tmp_path: Path) -> None:
    model, optimizer, _ = make()
    trail: list[Any] = []

    def body(stop: Any = None) -> None:
        for i in resumable(range(2)):
            trail.append(("first", i))
        for i in resumable(range(3)):
            for j in resumable("abc"):
                trail.append((i, j))
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                if (i, j) == stop:
                    api.save(tmp_path / "a")
                    return

    single(lambda: body((1, "b")), model=model, optimizer=optimizer)
    assert trail[-1] == (1, "b")
    trail.clear()
    single(lambda: (api.load(tmp_path / "a"), body()), model=model, optimizer=optimizer)
    assert trail == [(1, "c"), (2, "a"), (2, "b"), (2, "c")]
    trail.clear()
    single(body, model=model, optimizer=optimizer)  # without a load it is a loop like any other
    assert len(trail) == 2 + 9


def test_a_loader_by_itself(single: Any, tmp_path: Path) -> None:
    model, optimizer, loader = make()
    seen: list[list[int]] = []

    def body(stop: int = 0) -> None:
        for index, x in resumable(loader):
            seen.append(index.tolist())
            model(x).sum().backward()
            optimizer.step()
            if len(seen) == stop:
                api.save(tmp_path / "a")
                return

    assert len(resumable(loader)) == len(loader)
    single(lambda: body(10), model=model, optimizer=optimizer, loader=loader)
    single(lambda: (api.load(tmp_path / "a"), body()), model=model, optimizer=optimizer, loader=loader)
    assert sorted(i for batch in seen for i in batch) == list(range(SAMPLES))


def test_weights_alone_do_not_move_loops(tmp_path: Path) -> None:
    model, optimizer, _ = make()
    objects = {"model": model, "optimizer": optimizer}
    for epoch in api.resumable(range(3)):
        if epoch == 1:
            api.save(tmp_path / "a", **objects)
            break
    api.load(tmp_path / "a", **objects)
    assert list(api.resumable(range(3))) == [1, 2]
    assert api.resume() is None, "a loop of the notebook has used it"
    api.load(tmp_path / "a", model=model)
    assert api.resume() is None
    assert list(api.resumable(range(3))) == [0, 1, 2]


def test_another_loader_begins_anew(single: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, loader = make()
    objects = {"model": model, "optimizer": optimizer}
    single(lambda: train(model, optimizer, loader, stop=(1, 4), save=str(tmp_path / "a")), **objects, loader=loader)
    other = DataLoader(loader.dataset, 4)
    seen: Seen = []
    single(lambda: (api.load(tmp_path / "a"), seen.extend(train(model, optimizer, other))), **objects, loader=other)
    assert len([1 for epoch, _ in seen if epoch == 1]) == 12
    assert "the loader has 12 batches, and had 24 when the checkpoint was made" in capsys.readouterr().err
