"""Layers that freeze and thaw in the middle of a loop: what the loop sees of gradients is what one process sees, in
that very step, or one sentence says why not. Edit × strategy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.machine import registry
from tests.support.absent import absent
from tests.support.bench import Bench
from tests.support.models import Net, net
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.thorough

Numbers = dict[str, torch.Tensor]
ACCURACY = 1e-5

STRATEGIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {"bucket_mb": 0.0002}),
    "zero1": ("zero1", {}),
    "sharded": ("sharded", {}),
    "horovod": ("horovod", {}),
    "fsdp": ("fsdp", {}),
}


# --- what the loop does with its gradients, before the step ---------------------------------------


def nothing(model: Net) -> None:
    pass


def clip_value(model: Net) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def clip_norm(model: Net) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def by_hand(model: Net) -> None:
    """Not linear: a local gradient, averaged afterwards, would be another."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(1 + p.grad.abs().sqrt())


def read(model: Net) -> None:
    """A learning rate, say, that a gradient decides."""
    for p in model.parameters():
        if p.grad is not None:
            model.seen += float(p.grad.abs().sum())  # type: ignore[operator]


EDITS: tuple[Callable[[Net], None], ...] = (nothing, clip_norm, clip_value, by_hand, read)


# --- what changes on the way ----------------------------------------------------------------------


def thaw(model: Net) -> None:
    model.first.requires_grad_(True)


def freeze(model: Net) -> None:
    model.blocks[0].requires_grad_(False)


def both(model: Net) -> None:
    thaw(model)
    freeze(model)


def all_others(model: Net) -> None:
    for p in model.parameters():
        p.requires_grad_(not p.requires_grad)


CHANGES: tuple[Callable[[Net], None], ...] = (thaw, freeze, both, all_others)


def changing(bench: Bench, change: Callable[[Net], None], edit: Callable[[Net], None], add: int, flags: int) -> Net:
    """`add`: so many batches a step, added up by hand; `flags`: the same by `--accumulate`."""
    model = net()
    model.first.requires_grad_(False)
    model.seen = 0.0  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), 0.02)
    share = add * (flags if bench.world_size == 1 else 1)
    at = 2 if add == flags == 1 else 3  # in the middle of what is added up

    def loop() -> None:
        for i, (x, y) in enumerate(bench.loader(48, 8)):
            if i == at:
                change(model)
            (F.cross_entropy(model(x), y) / share).backward()
            if (i + 1) % share == 0:
                edit(model)
                optimizer.step()
                optimizer.zero_grad()

    bench.cell(loop, accumulate=flags if bench.world_size > 1 else 1, model=model, optimizer=optimizer)
    return model


# --- the table ------------------------------------------------------------------------------------

TABLE: dict[str, Callable[[Bench], Net]] = {
    **{
        f"{change.__name__}, {edit.__name__}{how}": (
            lambda bench, change=change, edit=edit, add=add, flags=flags: changing(bench, change, edit, add, flags)
        )
        for change in CHANGES
        for edit in EDITS
        for how, add, flags in (("", 1, 1), (", added up", 2, 1), (", --accumulate", 1, 2))
        if flags == 1 or edit not in (by_hand, read)  # there they see each batch
    },
}


def _played(bench: Bench, program: Callable[[Bench], Net]) -> Numbers | str:
    def played(bench: Bench) -> Numbers:
        model = program(bench)
        bench.runtime.components.forget()  # what was in pieces is whole again
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        return {**weights, "seen": torch.tensor(float(model.seen))}  # type: ignore[arg-type]

    try:
        return bench.play(played)
    except NotSupported as error:
        return str(error)


def _on_a_rank(rank: int, name: str, options: dict[str, Any]) -> dict[str, Numbers | str]:
    strategy = registry.strategy(name).load()
    return {at: _played(Bench(rank, 2, strategy(strategy.Options(**options))), TABLE[at]) for at in TABLE}


@cache
def _alone() -> dict[str, Numbers | str]:
    return {name: _played(Bench(), program) for name, program in TABLE.items()}


def _apart(found: Numbers | str, wanted: Numbers | str) -> str:
    """What is wrong with it, in words."""
    assert not isinstance(wanted, str), wanted
    if isinstance(found, str):
        names_a_line = re.search(r"--strategy |-s |`with whole\(", found)
        return "" if names_a_line else f"a sentence without a line to write: {found}"
    far = [at for at, value in wanted.items() if not torch.allclose(found[at], value, rtol=ACCURACY, atol=ACCURACY)]
    return ", ".join(far)


@pytest.mark.sample("ddp")
@pytest.mark.limit(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_as_one_process(strategy: str) -> None:
    name, options = STRATEGIES[strategy]
    for package in registry.strategy(name).needs.packages:
        if find_spec(package) is None:
            absent(f"{package} is not installed", f"pip install {package}")
    ranks = run_on_ranks(_on_a_rank, name, options, timeout=240)
    wrong = {at: what for found in ranks for at in found if (what := _apart(found[at], _alone()[at]))}
    assert not wrong, "\n".join(f"{at}: {what}" for at, what in wrong.items())
    if name in ("ddp", "zero1", "horovod"):
        refused = [at for at in TABLE if isinstance(ranks[0][at], str)]
        assert not refused, refused
