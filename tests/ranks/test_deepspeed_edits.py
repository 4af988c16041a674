"""Weights that a cell reads and writes by hand, under DeepSpeed: as in one process, at every stage."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.errors import NotSupported
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import DeepSpeed, config
from tests.fuzz.sessions import Live, live
from tests.lines.playing import numbers
from tests.support.deepspeed import SHARDED, Tied, batches, deepspeed_here, distance, make, mse, weights_of  # noqa: F401
from tests.support.ranks import run_on_ranks


def each(change: Callable[[Any], Any]) -> Callable[[Tied], None]:
    def edit(model: Tied) -> None:
        with torch.no_grad():
            for p in model.parameters():
                change(p)

    return edit


def assign(p: Any) -> None:
    p.data = p.data * 0.5


def vector(model: Tied) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat.detach() * 0.7, model.parameters())


def saved(model: Tied) -> None:
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


EDITS: dict[str, Callable[[Tied], Any]] = {
    "fill_": each(lambda p: p.fill_(0.1)),
    "p.data =": each(assign),
    "load_state_dict": saved,
    "a vector": vector,
}


def in_16_bits(rank: int, stage: int) -> dict[str, dict[str, float]]:
    """Of each edit, by weight: how far it is from what was written, after a step followed."""
    found = {}
    for name in EDITS:
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


@pytest.mark.sample("3")
@pytest.mark.parametrize("stage", [2, 3])
def test_edits_of_weights_in_16_bits_last(stage: int) -> None:
    for found in run_on_ranks(in_16_bits, stage, timeout=120):
        far = {(name, key): far for name, apart in found.items() for key, far in apart.items() if far > 0.01}
        assert far == {}


STATES: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "step of one": (lambda groups: torch.optim.AdamW(groups, 1e-2), lambda o, p: o.state[p]["step"].fill_(40)),
    "another step for one": (
        lambda groups: torch.optim.Adam(groups, 1e-2),
        lambda o, p: o.state[p].update(step=torch.tensor(1.0)),
    ),
    "state of one deleted": (lambda groups: torch.optim.AdamW(groups, 1e-2), lambda o, p: o.state.pop(p)),
    "momentum of one taken away": (
        lambda groups: torch.optim.SGD(groups, 1e-2, momentum=0.9, dampening=0.5),
        lambda o, p: o.state[p].update(momentum_buffer=None),
    ),
    "a product of one": (lambda groups: torch.optim.NAdam(groups, 1e-2), lambda o, p: o.state[p]["mu_product"].mul_(2)),
}


def with_states(rank: int, stage: int, count: int) -> dict[str, Any]:
    """Two steps, something is done to the optimizer's state, two steps more in a cell each."""
    found = {}
    for name, (made, change) in STATES.items():
        model, _, _ = make()
        first, *rest = (p for p in model.parameters() if p.requires_grad)
        optimizer = made([{"params": [first, rest[0]]}, {"params": rest[1:], "lr": 3e-3}])
        prepared: Any = None
        if count > 1:
            component = Component({"model": model}, {"optimizer": optimizer})
            prepared = DeepSpeed(DeepSpeed.Options(stage=stage, config=SHARDED)).set_up(component)
        for i, (x, y) in enumerate(batches(4)):
            if prepared and i != 1:
                prepared.enter()
            with prepared.backward() if prepared else contextlib.nullcontext():
                mse(model(x[rank::count]), y[rank::count]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if prepared and i:
                prepared.leave()
            if i == 1:
                change(optimizer, rest[1])
        if prepared:
            prepared.close()
        entries = [{k: torch.as_tensor(v) for k, v in optimizer.state[p].items()} for p in (first, *rest)]
        state = {f"{i}.{key}": value for i, entry in enumerate(entries) for key, value in entry.items()}
        found[name] = weights_of(model) | state
    return found


@pytest.mark.sample("1")
@pytest.mark.parametrize("stage", [1, 3])
def test_one_parameter_may_have_taken_other_steps(stage: int) -> None:
    wanted = with_states(0, stage, 1)
    for found in run_on_ranks(with_states, stage, 2, timeout=120):
        apart = {name: distance(found[name], wanted[name]) for name in wanted}
        assert {name: far for name, far in apart.items() if not far < 1e-5} == {}


def loads_uneven(rank: int, stage: int) -> None:
    """In a cell it is a sentence, and the next cell takes it."""
    model, optimizer, _ = make()
    prepared: Any = DeepSpeed(DeepSpeed.Options(stage=stage)).set_up(
        Component({"model": model}, {"optimizer": optimizer})
    )
    for cell in range(2):
        prepared.enter()
        for x, y in batches(2):
            with prepared.backward():
                mse(model(x[rank::2]), y[rank::2]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if not cell:
            kept = optimizer.state_dict()
            kept["state"][1]["step"] += 5
            with pytest.raises(NotSupported, match=r"different numbers of steps.*in a cell that is not distributed"):
                optimizer.load_state_dict(kept)
        prepared.leave()
    prepared.close()
    steps = [float(entry["step"]) for entry in optimizer.state.values()]
    assert sorted(steps) == [4.0] * (len(steps) - 1) + [9.0]


def test_an_uneven_state_is_not_loaded_in_a_cell() -> None:
    run_on_ranks(loads_uneven, 2)


def test_a_digest_sees_what_is_exchanged() -> None:
    from nbtrain.strategies.kit.same_on_ranks import COLUMNS, bits_summed

    for dtype in (torch.bfloat16, torch.float32):
        one = torch.randn(3 * COLUMNS + 5).to(dtype)
        for first, second in ((0, 1), (0, COLUMNS), (3 * COLUMNS, 3 * COLUMNS + 1)):
            other = one.clone()
            other[first], other[second] = one[second], one[first]
            assert not all(map(torch.equal, bits_summed(one), bits_summed(other)))
        assert all(map(torch.equal, bits_summed(one), bits_summed(one.clone())))


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


START = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
X = torch.randn(48, 4); Y = (X.sum(1) > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=8)
m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
def adamw(lr=0.01): return torch.optim.AdamW(m.parameters(), lr)
o, result = adamw(), None
def epoch(one=None, top=True):
    one = one or o
    for i, (x, y) in zip(range(2), loader):
        if top: one.zero_grad()
        F.cross_entropy(m(x), y).backward(); one.step()
        if not top: one.zero_grad()
"""
ANOTHER = "%epoch(); p = adamw(0.02); epoch(p); "
CALLED = (
    "%epoch(); w = {{n: {} for n, p in m.named_parameters()}}\n"
    "result = torch.func.functional_call(m, parameter_and_buffer_dicts=w, args=(X,)).detach(); epoch(); del w"
)
LAYER = r"has put another layer into a model.*in a cell before"
NOTEBOOKS: dict[str, tuple[tuple[str, ...], dict[int, str]]] = {
    "a step count of one": (("%epoch()", "o.state[m[2].weight]['step'].fill_(50)", "%epoch()", "%epoch()"), {}),
    "optimizers made in a loop": (("%for k in range(3): o = adamw(0.02); epoch(top=k)", "%epoch()"), {}),
    "a cell that makes it, twice": (("%o = adamw(); epoch()",) * 2, {}),
    "another name": ((ANOTHER + "o = p", "%epoch()"), {}),
    "both": ((ANOTHER + "epoch(o)",), dict.fromkeys((2, 3), r"another optimizer steps.*join them into one")),
    "after a backward": (
        ("%epoch(); F.cross_entropy(m(X), Y).backward(); o = adamw(); o.step()",),
        dict.fromkeys((2, 3), r"a new optimizer between loss\.backward\(\).*after optimizer\.step\(\)"),
    ),
    "not zeroed": (
        ("%epoch(); o = adamw(); F.cross_entropy(m(X), Y).backward(); o.step()",),
        dict.fromkeys((2, 3), "were not set to None or zero"),
    ),
    "another group in a cell": (
        (
            "o = torch.optim.AdamW(m[:4].parameters(), 0.01)",
            "%epoch(); o.add_param_group({'params': m[4].parameters()}); epoch()",
            "%epoch()",
        ),
        {},
    ),
    "another group between cells": (
        (
            "o = torch.optim.AdamW(m[:4].parameters(), 0.01)",
            "%epoch()",
            "o.add_param_group({'params': m[4].parameters()})",
            "%epoch()",
        ),
        {},
    ),
    "groups changed by hand": (
        ("%epoch(top=False); o.param_groups[0]['params'] = [*m[0].parameters()]; epoch(top=False)",),
        dict.fromkeys((2, 3), r"holds other parameters.*in a cell that is not distributed"),
    ),
    "called with its own weights": ((CALLED.format("p"),), {}),
    "called with other weights": (
        (CALLED.format("p.detach().clone()"),),
        {3: r"functional_call with other weights.*Take --stage 2, or --strategy ddp"},
    ),
    "another layer": (
        ("%epoch(); m[4] = nn.Linear(6, 2); o.add_param_group({'params': m[4].parameters()}); epoch()",),
        {2: r"taken out of it, make the optimizer anew, in a cell that is not distributed", 3: LAYER},
    ),
    "another layer, which is not trained": (("%epoch(); m.append(nn.PReLU(2)); epoch()", "%epoch()"), {3: LAYER}),
}
"""cells, those with a % on the ranks; by stage, the sentence that is told"""


def played(notebook: Live, cells: tuple[str, ...], ranks: bool) -> dict[str, Any] | str:
    notebook.clear()
    for cell in (START, *cells):
        error = notebook.run(cell.removeprefix("%"), ranks and cell.startswith("%"))
        if error is not None:
            return str(error)
    return numbers([notebook.namespace[name] for name in ("m", "o", "result")])


@pytest.mark.thorough
@pytest.mark.limit(200)
@pytest.mark.parametrize("stage", [2, 3])
def test_optimizers_that_cells_make_and_change(stage: int) -> None:
    wrong = {}
    with live(f"-s deepspeed --stage {stage} -d 2 --split-batches --monitor off") as notebook:
        for name, (cells, said) in NOTEBOOKS.items():
            found = played(notebook, cells, True)
            if said.get(stage):
                if not (isinstance(found, str) and re.search(said[stage], found)):
                    wrong[name] = str(found)
            elif isinstance(found, str):
                wrong[name] = found
            else:
                wanted: Any = played(notebook, cells, False)
                if found.keys() != wanted.keys() or not distance(found, wanted) < 1e-4:
                    wrong[name] = "other numbers"
    assert not wrong, "\n".join(map(str, wrong.items()))
