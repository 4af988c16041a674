"""A checkpoint is whole or not there, and the training goes on from it under any strategy on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nbtrain import registry
from nbtrain.specs import PoolSpec, RankInfo, RunSpec
from nbtrain.strategies.ddp import DDP
from nbtrain.strategies.single import Single
from nbtrain.training.checkpoints import here
from nbtrain.training.runtime import Runtime
from tests.flat import FlatPieces
from tests.ranks import run_on_ranks

BATCH = 12
SPEC = RunSpec(pool=PoolSpec())


class Net(nn.Module):
    """Tied weights, a frozen layer, a buffer, a parameter without dimensions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.out = nn.Linear(width, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        h = self.norm(F.relu(self.inner(self.embed(x))))
        return self.out(self.frozen(h) * self.scale)


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = Net()
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (BATCH, 5), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, scheduler: Any, steps: range, rank: int = 0, world: int = 1) -> None:
    """The same global batches on any number of ranks."""
    for step in steps:
        x = batch(step)[rank::world]
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """As plain numbers; the cell is still running, so everything is whole under `ddp` and the flat strategy."""
    found = {key: value.detach().clone() for key, value in model.state_dict().items()}
    for i, group in enumerate(optimizer.param_groups):
        found[f"lr {i}"] = torch.tensor(group["lr"])
    return found


@contextmanager
def cell(rank: int, world: int, strategy: Any, spec: RunSpec = SPEC, **objects: Any) -> Iterator[Runtime]:
    info = RankInfo(rank=rank, world_size=world, local_rank=rank, device="cpu", threads=1)
    runtime = Runtime(info, strategy, lambda event: None)
    runtime.install()
    try:
        runtime.begin(spec, objects)
        yield runtime
        runtime.end(True)
        runtime.checkpoints.finish()
    finally:
        here.enter(None)
        runtime.uninstall()


SETUPS: dict[str, tuple[int, Any]] = {
    "single": (1, lambda: Single(Single.Options())),
    "ddp-2": (2, lambda: DDP(DDP.Options())),
    "flat-3": (3, lambda: FlatPieces(FlatPieces.Options())),
}
for name, world, options in (
    ("fsdp", 4, {}),
    ("deepspeed", 2, {"stage": 2}),
    ("deepspeed", 2, {"stage": 3}),
):
    if (entry := registry.find_strategy(name)) is not None:
        label = "-".join(map(str, [name, *options.values(), world]))
        SETUPS[label] = (world, lambda name=name, options=options: registry.make_strategy(name, options, {}))


def on(setup: str, function: Any, *args: Any) -> list[Any]:
    world = SETUPS[setup][0]
    return run_on_ranks(
        _alone if world == 1 else function, *((function, *args) if world == 1 else args), world_size=world, timeout=120
    )


def _alone(rank: int, function: Any, *args: Any) -> Any:
    torch.distributed.destroy_process_group()
    try:
        return function(rank, *args)
    finally:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def _save(rank: int, setup: str, path: str, full: bool) -> None:
    world, strategy = SETUPS[setup]
    model, optimizer, scheduler = make()
    with cell(rank, world, strategy(), model=model, optimizer=optimizer, scheduler=scheduler):
        train(model, optimizer, scheduler, range(3), rank, world)
        here.save(path, full=full)
        train(model, optimizer, scheduler, range(3, 4), rank, world)  # while it is written


def _load(rank: int, setup: str, path: str) -> Any:
    world, strategy = SETUPS[setup]
    model, optimizer, scheduler = make(seed=1)
    with cell(rank, world, strategy(), model=model, optimizer=optimizer, scheduler=scheduler) as runtime:
        here.load(path)
        train(model, optimizer, scheduler, range(3, 4), rank, world)
        runtime.steps.at_boundary()
        here.save(path + f"-after-{setup}")
    return None


def reference(steps: int = 4) -> dict[str, torch.Tensor]:
    model, optimizer, scheduler = make()
    train(model, optimizer, scheduler, range(steps))
    return {**model.state_dict(), **{f"lr {i}": torch.tensor(g["lr"]) for i, g in enumerate(optimizer.param_groups)}}


def loaded(path: str) -> tuple[dict[str, torch.Tensor], Any]:
    """Into plain objects, without any ranks."""
    model, optimizer, scheduler = make(seed=2)
    here.load(path, model=model, optimizer=optimizer, scheduler=scheduler)
    found = {**model.state_dict(), **{f"lr {i}": torch.tensor(g["lr"]) for i, g in enumerate(optimizer.param_groups)}}
    return found, (model, optimizer, scheduler)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    here._plain = here._resume = None


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize("saved", SETUPS)
def test_every_pair(saved: str, full: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "at-3")
    on(saved, _save, saved, path, full)
    three, four, five = reference(3), reference(4), reference(5)
    found, _ = loaded(path)
    for key, value in three.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")
    for setup in SETUPS if not full else [saved]:
        on(setup, _load, setup, path)
        found, objects = loaded(path + f"-after-{setup}")
        for key, value in four.items():
            torch.testing.assert_close(
                found[key], value, rtol=1e-5, atol=1e-6, msg=lambda m, key=key, setup=setup: f"{setup}: {key}: {m}"
            )
        train(*objects, range(4, 5))  # the optimizer's state, too
        for key, value in objects[0].state_dict().items():
            torch.testing.assert_close(value, five[key], rtol=1e-5, atol=1e-6)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
