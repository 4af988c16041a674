"""Weights that a cell reads and writes by hand, under DeepSpeed: as in one process, at every stage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.errors import NotSupported
from nbtrain.strategies._deepspeed import config
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import DeepSpeed
from tests.absent import absent
from tests.ranks import run_on_ranks
from tests.test_deepspeed import SHARDED, Net, batches, distance, make, mse, weights_of

Parameters = Iterable[torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    if find_spec("deepspeed") is None:
        absent("DeepSpeed is not installed", "pip install deepspeed")
    from nbtrain.strategies._deepspeed.library import imported

    imported(torch.device("cpu"))


def each(change: Callable[[Any], Any]) -> Callable[[Net], None]:
    def edit(model: Net) -> None:
        with torch.no_grad():
            for p in model.parameters():
                change(p)

    return edit


def rows(p: Any) -> None:
    p[0].mul_(0.5)
    p.view(-1)[1] = 3.0


def assign(p: Any) -> None:
    p.data = p.data * 0.5


def put_back(p: Any) -> None:
    """As an average is put in the place of the weights for an evaluation."""
    kept = p.data
    p.data = p.data * 0.5
    p.data = kept * 0.9


def average(model: Net) -> None:
    kept = Net()
    kept.load_state_dict(model.state_dict())
    for mean, p in zip(kept.parameters(), model.parameters(), strict=True):
        mean.data.mul_(0.5).add_(p.data, alpha=0.3)
    for mean, p in zip(kept.parameters(), model.parameters(), strict=True):
        p.data.copy_(mean.data)


def vector(model: Net) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat.detach() * 0.7, model.parameters())


def saved(model: Net) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


EDITS: dict[str, Callable[[Net], Any]] = {
    "mul_": each(lambda p: p.mul_(0.9)),
    "fill_": each(lambda p: p.fill_(0.1)),
    "add_ of itself": each(lambda p: p.add_(p, alpha=-0.1)),
    "copy_": each(lambda p: p.copy_(torch.full(p.shape, 0.2))),
    "p.data.mul_": each(lambda p: p.data.mul_(0.8)),
    "p.data =": each(assign),
    "p.data is put back": each(put_back),
    "p[...] =": each(lambda p: p.__setitem__(..., 0.3)),
    "nn.init": each(lambda p: nn.init.constant_(p, 0.2)),
    "rows": each(rows),
    "norms": each(lambda p: p.mul_(p.norm().clamp(max=1) / p.norm())),
    "foreach": lambda model: torch._foreach_mul_([p.data for p in model.parameters()], 0.9),
    "foreach of weights": torch.no_grad()(lambda model: torch._foreach_mul_([*model.parameters()], 0.9)),
    "an average": average,
    "a vector": vector,
    "load_state_dict": saved,
}
PENALTIES: dict[str, Callable[[Net], torch.Tensor]] = {
    "L2": lambda model: 1e-2 * torch.stack([p.pow(2).sum() for p in model.parameters()]).sum(),
    "L1": lambda model: 1e-2 * torch.stack([p.abs().sum() for p in model.parameters()]).sum(),
    "the norm of all": lambda model: 1e-2 * torch.cat([p.flatten() for p in model.parameters()]).norm(),
    "rows of two layers": lambda model: (
        1e-1 * (model.blocks[0].weight[0] - model.blocks[2].weight[0]).pow(2).sum()  # type: ignore[index]
    ),
}


def train(rank: int, stage: int, cut: bool, count: int) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name in (*EDITS, *PENALTIES):
        model, optimizer, _ = make()
        prepared: Any = None
        if count > 1:
            options = DeepSpeed.Options(stage=stage, config=SHARDED if cut else None)
            prepared = DeepSpeed(options).set_up(Component({"model": model}, {"optimizer": optimizer}))
            prepared.enter()
        reads = []
        for x, y in batches(4):
            loss = mse(model(x[rank::count]), y[rank::count])
            if name in PENALTIES:
                loss = loss + PENALTIES[name](model)
            with prepared.backward() if prepared else contextlib.nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if name in EDITS:
                EDITS[name](model)
            reads.append(max(float(p.detach().abs().max()) for p in model.parameters()))
        kept = [p.data for p in model.parameters()]
        if prepared:
            prepared.leave()
            prepared.close()
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert {type(one) for one in kept} == {torch.Tensor}
        found[name] = {**weights_of(model), "read": torch.tensor(reads)}
    return found


@pytest.mark.parametrize(("stage", "cut"), [(1, False), (2, False), (3, False), (3, True)])
def test_edits_and_penalties_are_those_of_one_process(stage: int, cut: bool) -> None:
    wanted = train(0, stage, cut, 1)
    for found in run_on_ranks(train, stage, cut, 2, timeout=120):
        apart = {name: distance(found[name], wanted[name]) for name in wanted}
        assert {name: far for name, far in apart.items() if not far < 1e-5} == {}


def in_16_bits(rank: int, stage: int) -> dict[str, dict[str, float]]:
    """Of each edit, by weight: how far it is from what was written, after a step followed."""
    found = {}
    for name in ("fill_", "p.data =", "load_state_dict", "a vector"):
        model, _, _ = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        start = weights_of(model)
        prepared: Any = DeepSpeed(DeepSpeed.Options(stage=stage)).set_up(
            Component({"model": model}, {"optimizer": optimizer}), "bf16-true"
        )
        prepared.enter()
        for i, (x, y) in enumerate(batches(3)):
            with prepared.backward():
                mse(model(x[rank::2]).float(), y[rank::2]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i == 1:
                EDITS[name](model)
        prepared.leave()
        prepared.close()
        wanted = {"fill_": 0.0, "p.data =": 0.5, "load_state_dict": 0.9, "a vector": 0.7}[name]
        now = weights_of(model)
        found[name] = {
            key: float((now[key] - (wanted * value if wanted else 0.1)).abs().max()) for key, value in start.items()
        }
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_edits_of_weights_in_16_bits_last(stage: int) -> None:
    for found in run_on_ranks(in_16_bits, stage, timeout=120):
        far = {(name, key): far for name, apart in found.items() for key, far in apart.items() if far > 0.01}
        assert far == {}


def test_a_digest_sees_what_is_exchanged() -> None:
    from nbtrain.strategies._deepspeed.weights import COLUMNS, _digest

    for dtype in (torch.bfloat16, torch.float32):
        one = torch.randn(3 * COLUMNS + 5).to(dtype)
        for first, second in ((0, 1), (0, COLUMNS), (3 * COLUMNS, 3 * COLUMNS + 1)):
            other = one.clone()
            other[first], other[second] = one[second], one[first]
            assert not all(map(torch.equal, _digest(one), _digest(other)))
        assert all(map(torch.equal, _digest(one), _digest(one.clone())))


def in_place_on_a_leaf(rank: int) -> None:
    model, optimizer, _ = make()
    prepared: Any = DeepSpeed(DeepSpeed.Options(stage=3, config=SHARDED)).set_up(
        Component({"model": model}, {"optimizer": optimizer})
    )
    prepared.enter()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model.scale.mul_(2)
    prepared.leave()
    prepared.close()
    assert bool((model.scale == 1).all())


def test_a_parameter_is_still_a_leaf() -> None:
    run_on_ranks(in_place_on_a_leaf)


def wide(rank: int, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(NotSupported, match=r"steps weights and the optimizer's state in float32: write --strategy ddp"):
        DeepSpeed(DeepSpeed.Options()).set_up(Component({"model": model}, {"optimizer": optimizer}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_wider_models_are_refused(dtype: torch.dtype) -> None:
    run_on_ranks(wide, dtype)


def test_older_keys_and_lightnings_variable(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    older = {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}}
    settings, _ = config.build(DeepSpeed.Options(stage=3, config=older))
    assert [config.offload(settings, name) for name in ("offload_optimizer", "offload_param")] == ["cpu", "cpu"]
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    monkeypatch.delenv(config.ENVIRONMENT, raising=False)
    monkeypatch.setenv(config.LIGHTNING, str(tmp_path / "ds.json"))
    assert config.build(DeepSpeed.Options())[0]["zero_optimization"]["stage"] == 1
