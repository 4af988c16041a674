"""`save()` and `setup()` in the middle of a cell: gradients that are held are there afterwards as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.strategies.base import Strategy
from nbtrain.strategies.fsdp import FSDP
from nbtrain.worker.checkpoints import api
from tests.support.bench import cell
from tests.support.deepspeed import SHARDED, deepspeed_here  # noqa: F401
from tests.support.ranks import run_on_ranks

STEPS = 4
Batches = list[torch.Tensor]
Objects = tuple[nn.Module, torch.optim.Optimizer]
Between = Callable[[str, nn.Module, torch.optim.Optimizer], None]


def strategy(name: str, stage: int = 0) -> Strategy:
    if name == "fsdp":
        return FSDP(FSDP.Options())
    from nbtrain.strategies.deepspeed import DeepSpeed

    return DeepSpeed(DeepSpeed.Options(stage=stage, config=SHARDED))


def make() -> Objects:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def by_option(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, between: Between) -> None:
    """With `--accumulate 2`."""
    for x in batches:
        loss = F.mse_loss(model(x), x[:, :3])
        between("forward", model, optimizer)
        loss.backward()
        between("backward", model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        between("clip", model, optimizer)
        optimizer.step()
        between("step", model, optimizer)
        optimizer.zero_grad()


def by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, between: Between) -> None:
    for i, x in enumerate(batches):
        loss = F.mse_loss(model(x), x[:, :3]) / 2
        between("forward", model, optimizer)
        loss.backward()
        between("backward", model, optimizer)
        if i % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            between("clip", model, optimizer)
            optimizer.step()
            between("step", model, optimizer)
            optimizer.zero_grad()


LOOPS = {"by_option": (by_option, 2), "by_hand": (by_hand, 1)}
PLACES = ("nowhere", "forward", "backward", "clip", "step")


def trained(rank: int, kind: tuple[Any, ...], folder: str) -> dict[tuple[str, str], torch.Tensor]:
    """(loop, place of the save) → weights."""
    found = {}
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(8, 4, generator=generator)[rank::2] for _ in range(STEPS)]
    for name, chosen in product(LOOPS, PLACES):
        model, optimizer = make()
        loop, every = LOOPS[name]
        saves = 0

        def between(place: str, model: nn.Module, optimizer: torch.optim.Optimizer, chosen: str = chosen) -> None:
            nonlocal saves
            if place == chosen:
                saves += 1
                api.save(f"{folder}/{chosen}", model=model, optimizer=optimizer)

        with cell(
            rank, 2, strategy(*kind), RunSpec(pool=PoolSpec(), accumulate=every), model=model, optimizer=optimizer
        ) as runtime:
            loop(model, optimizer, batches, between)
            weights = {key: value.detach().clone() for key, value in whole(model).items()}
        assert saves == (0 if chosen == "nowhere" else 2 if name == "by_hand" and chosen in ("clip", "step") else STEPS)
        runtime.components.forget(False)
        found[name, chosen] = torch.cat([value.flatten() for value in weights.values()])
    return found


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


KINDS = [("fsdp",), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3)]


def reference() -> torch.Tensor:
    """One process, by hand."""
    model, optimizer = make()
    generator = torch.Generator().manual_seed(5)
    by_hand(model, optimizer, [torch.randn(8, 4, generator=generator) for _ in range(STEPS)], lambda *_: None)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.sample("fsdp")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_a_checkpoint_takes_nothing_away(kind: tuple[Any, ...], tmp_path: Path) -> None:
    wanted = reference()
    for found in run_on_ranks(trained, kind, str(tmp_path), timeout=120):
        for (name, place), weights in found.items():
            error = (weights - wanted).abs().max().item()
            assert error < 1e-6, f"{name}, saved after {place}: {error}"


def other_things(rank: int, kind: tuple[Any, ...]) -> torch.Tensor:
    """In the middle of a step: another model is set up, a scheduler comes to the one there is, and then something that
    makes it necessary to set it up anew."""
    model, optimizer = make()
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(8, 4, generator=generator)[rank::2] for _ in range(STEPS)]
    with cell(
        rank, 2, strategy(*kind), RunSpec(pool=PoolSpec(), accumulate=2), model=model, optimizer=optimizer
    ) as cell_:

        def between(place: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            times[place] = times.get(place, 0) + 1
            if place == "backward" and times[place] == 1:
                cell_.in_cell_models.setup(nn.Linear(2, 2), torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0))
            if place == "step" and times[place] == 3:
                lost = pytest.raises(NotSupported, match="would be lost")
                with lost if kind[0] == "fsdp" else contextlib.nullcontext():
                    cell_.in_cell_models.setup(nn.Sequential(model, nn.Linear(3, 3)), optimizer)

        times: dict[str, int] = {}
        by_option(model, optimizer, batches, between)
        found = torch.cat([value.flatten() for value in whole(model).values()]).clone()
    return found


@pytest.mark.parametrize("kind", [("fsdp",), ("deepspeed", 2), ("deepspeed", 3)], ids=lambda k: "-".join(map(str, k)))
def test_what_is_set_up_takes_nothing_away_or_is_refused(kind: tuple[Any, ...]) -> None:
    wanted = reference()
    for found in run_on_ranks(other_things, kind):
        assert (found - wanted).abs().max().item() < 1e-6


def gone_on(rank: int, kind: tuple[Any, ...], path: str) -> torch.Tensor:
    """A second cell goes on from a checkpoint, for which what it has is set up anew."""
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(8, 4, generator=generator)[rank::2] for _ in range(STEPS)]
    spec = RunSpec(pool=PoolSpec(), accumulate=2)
    for load in (False, True):
        model, optimizer = make()
        known = {"step", "zero_grad"} & vars(optimizer).keys()
        with cell(rank, 2, strategy(*kind), spec, model=model, optimizer=optimizer):
            if load:
                api.load(path)
            by_option(model, optimizer, batches[2 * load : 2 + 2 * load], lambda *_: None)
            if not load:
                api.save(path)
            weights = torch.cat([value.flatten() for value in whole(model).values()]).clone()
        assert {"step", "zero_grad"} & vars(optimizer).keys() == known
    return weights


@pytest.mark.parametrize("kind", [("deepspeed", 2), ("deepspeed", 3)], ids=lambda k: "-".join(map(str, k)))
def test_a_checkpoint_that_is_loaded_leaves_accumulation_on(kind: tuple[Any, ...], tmp_path: Path) -> None:
    wanted = reference()
    for found in run_on_ranks(gone_on, kind, str(tmp_path / "a")):
        assert (found - wanted).abs().max().item() < 1e-6


def inside(rank: int, kind: tuple[Any, ...], path: str) -> None:
    """Of a forward, and of a backward."""
    model, optimizer = make()
    x = torch.ones(2, 4)
    with cell(rank, 2, strategy(*kind), RunSpec(pool=PoolSpec()), model=model, optimizer=optimizer):
        handle = model[1].register_forward_hook(lambda *_: api.save(path, model=model))
        with pytest.raises(NotSupported, match="in the middle of a model's forward or backward"):
            model(x)
        handle.remove()
        out = model(x)
        out.register_hook(lambda _: api.save(path, model=model))
        with pytest.raises(NotSupported, match="in the middle of a model's forward or backward"):
            out.mean().backward()
        by_hand(model, optimizer, [x, x], lambda *_: None)
        api.save(path, model=model)


@pytest.mark.parametrize("kind", [("fsdp",), ("deepspeed", 2)], ids=lambda k: "-".join(map(str, k)))
def test_in_the_middle_of_a_forward_it_is_refused(kind: tuple[Any, ...], tmp_path: Path) -> None:
    run_on_ranks(inside, kind, str(tmp_path / "a"))
