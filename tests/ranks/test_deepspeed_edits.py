"""Weights that a cell reads and writes by hand, under DeepSpeed: as in one process, at every stage."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.base.errors import NotSupported
from nbtrain.strategies.base import Component
from nbtrain.strategies.deepspeed import DeepSpeed, config
from tests.fuzz.common_edits import WHOLE, CommonEdit
from tests.fuzz.player import Player
from tests.fuzz.sessions import Live, live
from tests.fuzz.verdicts import Oracle, judge
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
            optimizer.load_state_dict(kept)
        prepared.leave()
    prepared.close()
    steps = [float(entry["step"]) for entry in optimizer.state.values()]
    assert sorted(steps) == [4.0] * (len(steps) - 1) + [9.0]


@pytest.mark.sample("2")
@pytest.mark.parametrize("stage", [2, 3])
def test_a_state_of_uneven_steps_is_loaded_in_a_cell(stage: int) -> None:
    run_on_ranks(loads_uneven, stage)


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


def copied(rank: int) -> None:
    model, optimizer, _ = make()
    wanted = model.emb.weight.detach().clone()
    prepared: Any = DeepSpeed(DeepSpeed.Options(stage=3, config=SHARDED)).set_up(
        Component({"model": model}, {"optimizer": optimizer})
    )
    prepared.enter()
    for copy_of in (copy.deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor))):
        for show in SHOWN:
            found = copy_of(show(model.emb.weight))
            assert torch.equal(found, show(wanted)), show
            with torch.no_grad():
                found.zero_()
        assert torch.equal(model.emb.weight.detach(), wanted)
    prepared.leave()
    prepared.close()


SHOWN: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda w: w, lambda w: w.data, lambda w: w.detach(), lambda w: w.detach()[1], lambda w: w.data.t(),
)  # fmt: skip


def set_by_torch(rank: int) -> None:
    model, optimizer, _ = make()
    wanted = model.emb.weight.detach().clone()
    prepared: Any = DeepSpeed(DeepSpeed.Options(stage=3, config=SHARDED)).set_up(
        Component({"model": model}, {"optimizer": optimizer})
    )
    prepared.enter()
    with torch.no_grad():
        model.emb.weight.set_(wanted * 6)
    with pytest.raises(NotSupported, match="with whole"):
        model.emb.weight.set_(torch.zeros(9).untyped_storage())
    prepared.leave()
    prepared.close()
    assert torch.equal(model.emb.weight.detach(), wanted * 6)


def test_memory_that_set_gives_is_the_weights() -> None:
    run_on_ranks(set_by_torch)


def test_a_copy_of_a_weight_or_a_part_of_it_has_its_numbers() -> None:
    run_on_ranks(copied)


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
LAYER = r"has put another layer into a model.*with whole\(model, optimizer\): model.head = "
NOTEBOOKS: dict[str, tuple[tuple[str, ...], dict[int, str]]] = {
    "a step count of one": (("%epoch()", "o.state[m[2].weight]['step'].fill_(50)", "%epoch()", "%epoch()"), {}),
    "states that change places between cells": (
        (
            "%epoch()",
            "b = o.state[m[0].bias]; b['exp_avg'], b['exp_avg_sq'] = b['exp_avg_sq'], b['exp_avg'].abs_()\n"
            "k = o.state.pop(m[2].weight)['exp_avg']",
            "%epoch(); result = k + 1",
        ),
        {},
    ),
    "a hook between cells": (
        ("%epoch()", "h = m.register_forward_pre_hook(lambda m, a: a[0] * 0.9)", "%epoch()", "h.remove()", "%epoch()"),
        {},
    ),
    "drawn anew in a loop": (
        (
            "%epoch(); m[2].weight.data.normal_(0, 0.3); epoch(); nn.init.kaiming_uniform_(m[4].weight); epoch()\n"
            "nn.init.orthogonal_(m[2].weight); epoch()\n"
            "with torch.no_grad(): m[0].weight.add_(torch.randn_like(m[0].weight), alpha=0.1)\n"
            "m[0].bias.data[1:3].uniform_(-0.1, 0.1); epoch()",
        ),
        {},
    ),
    **{
        f"written by {one[:4]}": ((f"%epoch(); m[2].weight.data.{one}; epoch()",), {3: rf"`{one[:4]}.*with whole"})
        for one in ("apply_(lambda v: v * 0.9)", "map_(m[2].weight.data.clone(), lambda a, b: a * 0.5 + b * 0.4)")
    },
    "zeroed in place, and stepped": (
        ("%epoch(); o.zero_grad(set_to_none=False); o.step()",),
        dict.fromkeys((2, 3), "zeroed in place .* write optimizer.zero_grad"),
    ),
    "optimizers made in a loop": (("%for k in range(3): o = adamw(0.02); epoch(top=k)", "%epoch()"), {}),
    "a cell that makes it, twice": (("%o = adamw(); epoch()",) * 2, {}),
    "another name": ((ANOTHER + "o = p", "%epoch()"), {}),
    "both": ((ANOTHER + "epoch(o)",), dict.fromkeys((2, 3), r"another optimizer steps.*join them into one")),
    "after a backward": (
        ("%epoch(); F.cross_entropy(m(X), Y).backward(); o = adamw(); o.step()",),
        dict.fromkeys((2, 3), "were not set to None or zero"),
    ),
    "after a backward on nothing": (
        ("%epoch(top=False); F.cross_entropy(m(X), Y).backward(); o = adamw(); o.step()",),
        {},
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
        dict.fromkeys((2, 3), r"holds other parameters.*with whole\(model, optimizer\)"),
    ),
    "called with its own weights": ((CALLED.format("p"),), {}),
    "called with other weights": (
        (CALLED.format("p.detach().clone()"),),
        {3: r"functional_call with other weights.*take --stage 2"},
    ),
    "another layer": (
        ("%epoch(); m[4] = nn.Linear(6, 2); o.add_param_group({'params': m[4].parameters()}); epoch()",),
        {2: r"taken out of it, make layer and optimizer anew in `with whole\(model, optimizer\)", 3: LAYER},
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


COMPLETE = """%for i, (x, y) in zip(range(3), loader):
    F.cross_entropy(m(x), y).backward()
    with whole(m, gradients=True):
        result = [p.grad.clone() for p in m.parameters()]
        for p in m.parameters(): p.grad.clamp_(-0.05, 0.05)
        m[0].weight.grad.mul_(2)
    nn.utils.clip_grad_norm_(m.parameters(), 0.2)
    with whole(m[2], gradients=True): m[2].bias.grad = m[2].bias.grad.sign() * 0.01
    (0.1 * m(x).square().mean()).backward()
    o.step(); o.zero_grad()"""
LAYOUTS = {
    "--stage 1 --offload-optimizer cpu": 1e-5,
    "--stage 2 --offload-optimizer cpu": 1e-5,
    "--stage 3 --offload-optimizer cpu": 1e-5,
    "--stage 1 --precision bf16-true": 0.02,
    "--stage 2 --precision bf16-true": 0.02,
    "--stage 3 --precision bf16-true": 0.02,
    "--stage 2 --precision bf16-mixed": 0.02,
}
"""how far each may be from one process in 32 bits"""


@pytest.mark.thorough
@pytest.mark.parametrize("flags", LAYOUTS)
def test_gradients_are_read_and_written_wherever_the_engine_holds_them(flags: str) -> None:
    with live(f"-s deepspeed {flags} -d 2 --split-batches --monitor off") as notebook:
        cells = ("from nbtrain import whole\no = torch.optim.SGD(m.parameters(), 0.1)", COMPLETE, COMPLETE)
        wanted, found = played(notebook, cells, False), played(notebook, cells, True)
    assert not isinstance(found, str), found
    assert not isinstance(wanted, str), wanted
    assert distance(found, wanted) < LAYOUTS[flags]


BLOCK = "with whole(model, gradients=True)"
HALF = f"{BLOCK}:\n    for p in model.parameters(): p.grad.mul_(0.5)"
CLIP = "result.setdefault('n', []).append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))"
NORM = f"{BLOCK}: result['m'] = sum(p.grad.norm() ** 2 for p in model.parameters()).sqrt().item()"
AGAIN = "(0.1 * model(x).square().mean()).backward()"
NEW = "with whole(model, opt): opt = torch.optim.SGD(model.parameters(), lr=0.05)"
COUNT = "with whole(opt): opt.state[model[2].weight]['step'].fill_(20)"
SOME = "opt = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=0.01, eps=1e-4)"
SCALED = "with torch.no_grad():\n    for v in model.state_dict().values(): v.mul_(0.9)"
BLOCKS: dict[str, tuple[CommonEdit, str]] = {
    "a state dict written after each step": (CommonEdit("", SCALED, "between"), ""),
    "a state dict written at the end": (CommonEdit("", SCALED, "after"), ""),
    "clipped, read": (CommonEdit("", f"{CLIP}\n{NORM}", "gradients"), ""),
    "edited, clipped": (CommonEdit("", f"{HALF}\n{CLIP}", "gradients"), ""),
    "edited, a backward": (CommonEdit("", f"{HALF}\n{AGAIN}", "gradients"), ""),
    "clipped, a backward, edited": (CommonEdit("", f"{CLIP}\n{AGAIN}\n{HALF}\n{NORM}", "gradients"), ""),
    "all None": (CommonEdit("", f"if i % 2:\n    {BLOCK}: opt.zero_grad()", "gradients"), ""),
    "all None, a backward": (CommonEdit("", f"{BLOCK}: opt.zero_grad()\n{AGAIN}", "gradients"), ""),
    "one None, a backward": (CommonEdit("", f"{BLOCK}: model[0].weight.grad = None\n{AGAIN}", "gradients"), ""),
    "one None, clipped": (CommonEdit("", f"{BLOCK}: model[2].weight.grad = None\n{CLIP}", "gradients"), ""),
    "one None, accumulated": (
        CommonEdit("", f"if i % 2 == 0:\n    {BLOCK}: model[2].weight.grad = None\n    continue", "gradients"),
        "",
    ),
    "another norm": (
        CommonEdit("", f"{BLOCK}: nn.utils.clip_grad_norm_(model[0].parameters(), 0.01, norm_type=1)", "gradients"),
        "",
    ),
    "thawed": (
        CommonEdit(
            "", "with whole(model): model[0].requires_grad_(True)", "gradients", "", "model[0].requires_grad_(False)"
        ),
        "",
    ),
    "frozen with a gradient": (
        CommonEdit("", "with whole(model): model[0].requires_grad_(False)", "gradients"),
        "a layer was frozen between loss.backward() and optimizer.step()",
    ),
    "frozen, then zeroed": (CommonEdit("", "with whole(model): model[0].requires_grad_(epoch == 0)", "between"), ""),
    "another optimizer": (CommonEdit("", NEW, "gradients"), ""),
    "clipped, another optimizer": (CommonEdit("", f"{CLIP}\n{NEW}", "gradients"), ""),
    "another optimizer without a block": (CommonEdit("", f"{CLIP}\nif i == 1: {NEW[24:]}", "gradients"), ""),
    "a count of steps": (CommonEdit("", COUNT, "epoch"), ""),
    "a count of steps, with gradients": (CommonEdit("", f"if opt.state:\n    {COUNT}", "gradients"), ""),
    "groups by hand": (
        CommonEdit("", "with whole(model, opt): opt.param_groups[0]['params'] = [*model[:3].parameters()]", "epoch"),
        "",
    ),
    "one tensor at two places": (
        CommonEdit(
            "", "with whole(opt): opt.state[model[0].bias]['exp_avg'] = opt.state[model[2].bias]['exp_avg']", "epoch"
        ),
        "the optimizer's state has one tensor at two places",
    ),
    "loaded, of other counts": (
        CommonEdit(
            "",
            "with whole(opt): k = copy.deepcopy(opt.state_dict()); k['state'][1]['step'] += 5; opt.load_state_dict(k)",
            "epoch",
        ),
        "",
    ),
    "after the step": (CommonEdit("", NORM, "between"), "DeepSpeed's engine has used the gradients up"),
    "before the backward": (
        CommonEdit("", f"{BLOCK}: result['none'] = all(p.grad is None for p in model.parameters())", "loss"),
        "",
    ),
    "of a layer that is not trained": (
        CommonEdit("", f"{BLOCK}: result['g'] = model[0].weight.grad.sum().item()", "gradients", "", SOME),
        "",
    ),
    "an exception": (
        CommonEdit(
            "", f"try:\n    {BLOCK}: model[0].weight.grad.zero_(); 1 / 0\nexcept ZeroDivisionError: pass", "gradients"
        ),
        "",
    ),
}
"""and what the ranks say; nothing where it is as in one process"""


@pytest.mark.thorough
@pytest.mark.limit(300)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_block_does_to_an_engine(stage: int) -> None:
    wrong = {}
    with Oracle() as oracle, Player(f"deepspeed_stage_{stage}") as ranks:
        for what, (edit, said) in BLOCKS.items():
            cells = replace(edit, notebook=f"{WHOLE}\n{edit.notebook}").program()
            verdict = judge(*oracle.recall(cells), ranks.play(cells))
            if verdict.word != ("refused" if said else "right") or said not in verdict.why:
                wrong[what] = verdict
    assert not wrong, "\n".join(map(str, wrong.items()))
