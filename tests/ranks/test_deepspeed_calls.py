"""DeepSpeed where only a card shows what it does: the calls that are made to the library, seen on ranks of the CPU.

What stands for a card is marked "in place of a card". Everything else is real: the ranks, the engine, its steps. What
the calls do on a card (that streams overlap, that memory is pinned, that float16 is fast) is not seen here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import DeepSpeed, gradients
from nbtrain.strategies.deepspeed.config import build
from nbtrain.strategies.deepspeed.loss_scale import INITIAL, PATIENCE, LossScale
from tests.support.deepspeed import deepspeed_here  # noqa: F401
from tests.support.ranks import run_on_ranks

CPU = torch.device("cpu")
Options = DeepSpeed.Options


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def adam(model: nn.Module, **extras: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, **extras)


def engined(model: nn.Module, optimizer: Any, precision: str = "32", card: bool = False, **options: Any) -> Any:
    """As `DeepSpeed.set_up`, which refuses float16 on the CPU. `card`: in place of a card, the word "cuda" where the
    engine asks what it runs on; its tensors are where they were."""
    from nbtrain.strategies.deepspeed.engine import EngineComponent

    class OnCard(EngineComponent):
        device = property(lambda self: torch.device("cuda", 0), lambda self, found: None)  # type: ignore[assignment]

    settings, precision = build(Options(**options), precision)
    component = Component({"model": model}, {"optimizer": optimizer})
    return (OnCard if card else EngineComponent)(component, settings, precision, LossScale(), "")


@contextmanager
def cell(prepared: Any) -> Iterator[None]:
    prepared.enter()
    try:
        yield
    finally:
        prepared.leave()


def backward(prepared: Any, loss: torch.Tensor) -> None:
    """As the runtime does."""
    with prepared.backward() as factor:
        torch.autograd.backward(loss, torch.tensor(factor))


# FusedAdam: torch's own


def steps_on_a_card(rank: int) -> list[Any]:
    gradients.compare = lambda device: None  # type: ignore[assignment]  # there is no card to compare numbers on
    found = []
    for stage in (1, 2, 3):
        model, plain = net(), net()
        optimizer, other = adam(model), adam(plain)
        prepared = engined(model, optimizer, card=True, stage=stage)
        data = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1))
        with cell(prepared):
            for x in data:
                backward(prepared, model(x).square().mean())
                optimizer.step()
                plain(x).square().mean().backward()
                other.step()
                optimizer.zero_grad(), other.zero_grad()
        stepped = [group["fused"] for group in prepared.parts.engine.basic_optimizer.param_groups]
        prepared.close()
        apart = max((p - q).abs().max().item() for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        found.append((stepped, prepared.notes, [group["fused"] for group in optimizer.param_groups], apart))
    return found


def test_adam_on_a_card_is_torchs_fused_one() -> None:
    for found in run_on_ranks(steps_on_a_card):
        for stepped, notes, users, apart in found:
            assert stepped == [True]
            assert notes == ["AdamW steps this rank's share with torch's fused kernel"]
            assert users == [None]  # the user's own groups are as they were
            assert apart < 1e-6  # torch has the kernel for the CPU, too


def fused(rank: int) -> list[Any]:
    found = []
    for card, make in (
        (False, adam),
        (True, lambda model: adam(model, foreach=True)),
        (True, lambda model: adam(model, fused=False)),
        (True, lambda model: torch.optim.SGD(model.parameters(), 0.1)),
    ):
        model = net()
        prepared = engined(model, make(model), card=card)
        found.append([group.get("fused") for group in prepared.parts.engine.basic_optimizer.param_groups])
        prepared.close()
    return found


def test_what_the_user_said_of_the_kernel_holds() -> None:
    for found in run_on_ranks(fused):
        assert found == [[None], [None], [False], [None]]


# What DeepSpeed is configured with


class NoCard(Exception):
    """In place of a card: the call is seen, and not carried out."""


def told(rank: int, cases: list[tuple[str, dict[str, Any]]], real: bool = False) -> list[tuple[Any, Any]]:
    """For each (precision, options): the config that `deepspeed.initialize` is called with and, if the call is a `real`
    one, whether DeepSpeed overlaps."""
    import deepspeed

    seen: list[tuple[Any, Any]] = []
    initialize = deepspeed.initialize

    def called(**given: Any) -> Any:
        seen.append((given["config"], None))
        if not real:
            raise NoCard
        return initialize(**given)

    deepspeed.initialize = called
    for precision, options in cases:
        model = net()
        with nullcontext() if real else pytest.raises(NoCard):
            prepared = engined(model, adam(model), precision, **options)
            seen[-1] = seen[-1][0], prepared.parts.engine._config.zero_config.overlap_comm
            prepared.close()
    return seen


def test_overlapping_is_deepspeeds_unless_it_is_asked_for() -> None:
    cases = [("32", {"stage": stage, **more}) for stage in (2, 3) for more in ({}, {"overlap_comm": True})]
    for found in run_on_ranks(told, cases, True):
        assert ["overlap_comm" in config["zero_optimization"] for config, _ in found] == [False, True, False, True]
        assert [overlaps for _, overlaps in found] == [False, True, True, True]


def checkpointing(rank: int) -> list[tuple[bool, bool]]:
    import deepspeed

    seen = []
    configure = deepspeed.checkpointing.configure

    def called(*args: Any, **given: Any) -> None:
        seen.append((given["partition_activations"], given["checkpoint_in_cpu"]))
        configure(*args, **given)

    deepspeed.checkpointing.configure = called
    for options in ({}, {"cpu_checkpointing": True}, {"partition_activations": True}):
        model = net()
        engined(model, adam(model), **options).close()
    return seen


def test_where_checkpointed_activations_are_kept() -> None:
    for seen in run_on_ranks(checkpointing):
        assert seen == [(False, False), (False, True), (True, False)]


def test_in_float16_deepspeed_is_given_a_scale_that_stands_still() -> None:
    """It is moved by ours: see below."""
    own = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 4, "loss_scale_window": 9}}
    cases: list[tuple[str, dict[str, Any]]] = [("16-true", {}), ("32", {"config": own}), ("16-mixed", {})]
    for (low, _), (by_config, _), (mixed, _) in run_on_ranks(told, cases):
        for config in (low, by_config):
            assert config["fp16"]["enabled"] is True
            assert config["fp16"]["loss_scale"] == 1.0
        assert "fp16" not in mixed  # its weights are in 32 bits


# The loss scale


def scaled(rank: int) -> list[Any]:
    """16-mixed with DeepSpeed's own engine, on the CPU: torch's autocast has float16 there."""
    answers = []
    for stage in (1, 2, 3):
        model = net()
        optimizer = adam(model)
        prepared = engined(model, optimizer, "16-mixed", stage=stage)
        zero, scale = prepared.parts.engine.optimizer, prepared.loss_scale
        given: list[float] = []
        zero.override_loss_scale = recorded(given, zero.override_loss_scale)
        found, x = [], torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        with cell(prepared):
            for boost in (1e-3, 3e38 if rank else 1.0, 1e-3):  # on one rank a gradient is infinite
                backward(prepared, model(x).mean() * boost)
                norm = prepared.clip(model.parameters(), float("inf"), 2.0)
                before = prepared.skipped
                optimizer.step(), optimizer.zero_grad()
                found.append((float(zero.loss_scale), scale.value, prepared.skipped - before, float(norm)))
        prepared.close()
        answers.append((given, found, all(p.isfinite().all() for p in model.parameters())))
    return answers


def recorded(given: list[float], override: Callable[[float], None]) -> Callable[[float], None]:
    def call(scale: float) -> None:
        given.append(scale)
        override(scale)

    return call


def test_the_scale_of_deepspeed_is_ours_and_halves_when_a_gradient_is_infinite() -> None:
    half = INITIAL / 2
    for answers in run_on_ranks(scaled):
        for given, found, finite in answers:
            assert given == [INITIAL, INITIAL, half]
            assert [one[:3] for one in found] == [(INITIAL, INITIAL, 0), (INITIAL, INITIAL, 1), (half, half, 0)]
            assert finite
            assert 0 < found[0][3] < 0.1  # the norm of gradients without their scale
            assert found[2][3] == pytest.approx(found[0][3], rel=0.2)


def test_the_scale_doubles_after_many_good_steps() -> None:
    scale = LossScale()
    for _ in range(PATIENCE - 1):
        scale.begin()
        scale.stepped(overflow=False)
    assert scale.begin() == INITIAL
    scale.stepped(overflow=False)
    scale.holding.add(1)
    assert scale.begin() == INITIAL  # gradients are held that were made with it
    scale.holding.clear()
    assert scale.begin() == 2 * INITIAL
