"""Ranks that enter the same collective for different things are told so: two models, or two layers, of one shape."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.machine import registry
from nbtrain.worker.loop.shared_board import Board, OwnedBoard
from tests.support.bench import make_runtime
from tests.support.ranks import RankFailed, run_on_ranks

Models = list[nn.Sequential]


def picked(models: Models, rank: int) -> None:
    models[rank](torch.ones(2, 4)).sum().backward()


def copied(models: Models, rank: int) -> None:
    copies = [copy.deepcopy(models[0]) for _ in range(2)]
    copies[rank](torch.ones(2, 4)).sum().backward()


def branched(models: Models, rank: int) -> None:
    with torch.no_grad():
        models[0][rank](torch.ones(2, 4))


def alike(models: Models, rank: int) -> None:
    """Also where one rank has copied a model for itself."""
    best = copy.deepcopy(models[0]) if rank else None
    for model in (*models, copy.deepcopy(models[1])):
        model(torch.ones(2, 4)).sum().backward()
        torch.autograd.grad(model(torch.ones(2, 4)).sum(), [*model.parameters()])
    del best


def play(rank: int, path: str, strategy: str, program: Callable[[Models, int], None]) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))) for _ in range(2)]
    runtime = make_runtime(rank, 2, registry.make_strategy(strategy, {}, {}))
    runtime.install()
    objects: dict[str, Any] = {f"model{number}": model for number, model in enumerate(models)}
    runtime.begin(RunSpec(pool=PoolSpec(devices=("cpu",) * 2), strategy=strategy), objects, Board.open(path, 2), 1)
    program(models, rank)  # where it raises, this process ends: nobody is there for a last collective
    runtime.end(True)
    runtime.uninstall()


REFUSED = [("fsdp", picked), ("fsdp", branched), ("fsdp", copied), ("ddp", picked)]


@pytest.mark.parametrize(("strategy", "program"), REFUSED)
def test_ranks_that_work_on_different_models_are_told_so(
    strategy: str, program: Callable[[Models, int], None], tmp_path: Path
) -> None:
    said = pytest.raises(RankFailed, match=r"NotSupported: the ranks ran different layers.* rank 1 ")
    with closing(OwnedBoard(2, str(tmp_path))) as board, said:
        run_on_ranks(play, board.path, strategy, program)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_ranks_that_work_on_the_same_are_not(strategy: str, tmp_path: Path) -> None:
    with closing(OwnedBoard(2, str(tmp_path))) as board:
        run_on_ranks(play, board.path, strategy, alike)
