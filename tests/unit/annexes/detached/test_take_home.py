"""What a notebook takes over of a run that went on without it: the table of `take_home.py`, row by row."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nbtrain.annexes.detached import digests as digests_of
from nbtrain.annexes.detached import result_file
from nbtrain.annexes.detached.digests import digest, digests
from nbtrain.annexes.detached.take_home import Homecoming


def notebook() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {
        "model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "losses": [1.0], "box": {"model": model}, "seen": {1}, "table": torch.zeros(3), "number": 3, "words": "a",
        "function": notebook,
    }  # fmt: skip


def trained(space: dict[str, Any]) -> dict[str, Any]:
    space["model"](torch.randn(8, 3)).square().mean().backward()
    space["optimizer"].step()
    space["schedule"].step()
    space["losses"].append(0.5)
    space["seen"].add(2)
    space["table"] += 1
    space["number"] = 4
    space["best"] = 0.5
    return space


@pytest.fixture
def coming(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What a run has left that was sent `notebook()`, as another notebook opens it."""
    space = trained(notebook())
    names = [name for name in space if name not in ("words", "function")]
    assert result_file.write(tmp_path, space, names) == {"left": {}, "same": []}
    found, left = result_file.read(tmp_path, {})
    assert left == {}
    yield found
    found.clear()
    gc.collect()  # weights that lie in the mapped file let it go


def test_what_is_as_it_was_sent_is_filled_in_place(coming: dict[str, Any]) -> None:
    here, wanted = notebook(), trained(notebook())
    sent = digests(here, here)
    before = dict(here)
    weights = [*here["model"].parameters()]
    said = Homecoming(here, coming, sent, "run", {}).settle()
    assert said == [
        "model, table, optimizer, schedule, losses, box, seen: in place", "number: assigned", "best: new"
    ]  # fmt: skip
    kept = ("model", "optimizer", "schedule", "losses", "box", "seen", "table")
    assert all(here[name] is before[name] for name in kept)
    assert all(now is then for now, then in zip(here["model"].parameters(), weights, strict=True))
    for name, value in wanted["model"].state_dict().items():
        assert torch.equal(value, here["model"].state_dict()[name])
    assert here["box"]["model"] is here["model"]
    state = here["optimizer"].state[weights[0]]
    assert torch.equal(state["exp_avg"], wanted["optimizer"].state[next(wanted["model"].parameters())]["exp_avg"])
    assert here["optimizer"].param_groups[0]["lr"] == wanted["optimizer"].param_groups[0]["lr"] != 0.1
    assert (here["losses"], here["seen"], here["table"].tolist()) == ([1.0, 0.5], {1, 2}, [1, 1, 1])
    assert (here["number"], here["best"], here["words"]) == (4, 0.5, "a")


def test_what_has_changed_since_stays(coming: dict[str, Any]) -> None:
    here = notebook()
    sent = digests(here, here)
    here["losses"].append(9.0)
    here["number"] = 5
    here["model"] = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    here["optimizer"] = torch.optim.SGD(here["model"].parameters(), lr=0.1)
    before = copy.deepcopy(here["model"].state_dict())
    said = Homecoming(here, coming, sent, "run", {}).settle()
    assert (here["losses"], here["number"], here["best"]) == ([1.0, 9.0], 5, 0.5)
    assert all(torch.equal(value, here["model"].state_dict()[name]) for name, value in before.items())
    text = "\n".join(said)
    assert "model: yours kept, as 0.weight is (4, 3) there and (5, 3) here; the run's is run.values['model']" in text
    assert "optimizer: yours kept, as it is an Adam there and a SGD here" in text
    assert "losses: yours kept, as it has changed since; the run's is run.values['losses']" in text


def test_a_model_that_was_trained_here_since_stays_with_its_optimizer(coming: dict[str, Any]) -> None:
    here = notebook()
    sent = digests(here, here)
    trained(here)
    before = copy.deepcopy(here["model"].state_dict())
    coming["model"][0].weight.data.add_(1)  # as one that has trained longer
    said = Homecoming(here, coming, sent, "run", {}).settle()
    assert all(torch.equal(value, here["model"].state_dict()[name]) for name, value in before.items())
    assert "model: yours kept, as it has changed since; the run's is run.values['model']" in said
    assert "optimizer: yours kept, as it goes with model; the run's is run.values['optimizer']" in said
    assert "schedule: yours kept, as it goes with optimizer; the run's is run.values['schedule']" in said


@pytest.mark.parametrize("is_trained", [False, True])
def test_another_kernel_s_model_is_filled_where_it_is_only_made(coming: dict[str, Any], is_trained: bool) -> None:
    here = notebook()
    sent = digests(here, here)
    nn.init.ones_(here["model"][0].weight)
    here = trained(here) if is_trained else here
    Homecoming(here, coming, sent, "run", {}, started_here=False).settle()
    assert torch.equal(here["model"][0].weight, coming["model"][0].weight) is not is_trained


def test_a_model_that_only_evaluates_since_is_filled(coming: dict[str, Any]) -> None:
    here = notebook()
    sent = digests(here, here)
    here["model"].eval()
    assert any(said.startswith("model, ") and "in place" in said for said in Homecoming(
        here, coming, sent, "run", {}).settle())  # fmt: skip
    assert here["model"].training


@pytest.mark.parametrize("part", [nn.Tanh, nn.BatchNorm1d])
def test_a_model_that_is_made_anew(coming: dict[str, Any], part: type[nn.Module]) -> None:
    here = notebook()
    sent = digests(here, here)
    coming["model"].append(nn.ReLU())
    old = here["optimizer"]
    here["model"] = copy.deepcopy(here["model"]).append(part() if part is nn.Tanh else nn.ReLU())
    before = copy.deepcopy(here["model"].state_dict())
    there = Homecoming(here, coming, sent, "run", {}, started_here=False)
    text = "\n".join(there.settle())
    assert here["optimizer"] is old
    if part is nn.Tanh:
        assert all(torch.equal(value, here["model"].state_dict()[name]) for name, value in before.items())
        assert "model: yours kept, as 3 is a ReLU there and a Tanh here" in text
        assert "optimizer: yours kept, as it goes with model" in text
    else:
        assert torch.equal(here["model"][0].weight, coming["model"][0].weight)
        assert "optimizer: yours kept, as it trains another model than 'model'" in text


SHARED = """
a = [1]; nest = {"a": a}; b = [2]; cfg = {"b": b}; hold = {}; bound = []; old = bound; gone = [4]; stays = [5]
teacher = nn.Sequential(nn.Linear(2, 2)); best = None; one = [6]; two = [one]
held = {"net": nn.Linear(2, 2)}; model = nn.Linear(2, 3); w = torch.zeros(2, requires_grad=True)
opt = torch.optim.SGD(held["net"].parameters(), 0.1); more = [opt]
adam = torch.optim.Adam([*model.parameters(), w], 0.1); params = adam.param_groups[0]["params"]
schedule = torch.optim.lr_scheduler.StepLR(opt, 1)
def step(model, opt): opt.zero_grad(); model(torch.ones(1, 2)).sum().backward(); opt.step()
"""
ROWS = {
    "one that is edited": ("a.append(2)", "", "nest['a'] is a and a == [1, 2]"),
    "one that only another holds": ("hold['b'] = cfg['b']", "", "hold['b'] is b and cfg['b'] is b and b == [2]"),
    "one that was changed here": ("hold['b'] = b", "b.append(3)", "hold['b'] is b and b == [2, 3]"),
    "a model's part": ("hold['layer'] = teacher[0]", "", "hold['layer'] is teacher[0]"),
    "a model that was changed here": (
        "hold['it'] = teacher", "nn.init.ones_(teacher[0].weight)",
        "hold['it'] is teacher and teacher[0].weight.sum() == 4",
    ),
    "one that is bound anew": ("bound = [9]", "", "bound == [9] and old == []"),
    "another's name": ("bound = a; a.append(2)", "", "bound is a and nest['a'] is a and a == [1, 2] and old == []"),
    "a model for None": ("best = nn.Linear(2, 2)", "", "type(best) is nn.Linear"),
    "one that is deleted": ("del gone, stays", "stays.append(6)", "'gone' not in globals() and stays == [5, 6]"),
    "a model that only a dict holds": (
        "step(held['net'], opt)", "",
        "opt.param_groups[0]['params'][0] is held['net'].weight and schedule.optimizer is opt is more[0]",
    ),
    "parameters of a model, and loose ones": (
        "step(model, adam)", "", "params[0] is model.weight and params[2] is w and len(adam.state) == 2",
    ),
    "a model of another shape": (
        "model = nn.Linear(2, 5); adam = torch.optim.Adam(model.parameters()); step(model, adam)", "",
        "adam.param_groups[0]['params'][0] is model.weight and len(model.bias) == 5",
    ),
    "a layer that is set anew": (
        "held['net'] = nn.Linear(2, 5)", "", "held['net'].bias.shape == (5,)",
    ),
    "one in a list": ("two.append(a)", "", "two[0] is one and two[1] is a"),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_is_one_object_there_is_one_here(tmp_path: Path, row: str) -> None:
    cell, since, holds = ROWS[row]
    here: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(SHARED, here)
    sent = {name: value for name, value in here.items() if name not in ("nn", "torch", "step", "__builtins__")}
    told, there = digests(sent, sent), copy.deepcopy(sent)
    before = dict(there)
    run = {**here, **there}
    exec(cell, run)
    made = {name: value for name, value in run.items() if name not in ("nn", "torch", "step", "__builtins__")}
    changed = [name for name in made if made[name] is not before.get(name) or digest(made[name]) != told[name]]
    end = result_file.write(tmp_path, run, changed, [name for name in made if name not in changed])
    end["rebound"] = [name for name in changed if made[name] is not before.get(name)]
    end["deleted"] = [name for name in before if name not in made]
    exec(since, here)
    found, _ = result_file.read(tmp_path, here)
    Homecoming(here, found, told, "run", end).settle()
    assert eval(holds, here)


def test_a_large_tensor_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """To copy it would take as much memory again."""
    monkeypatch.setattr(digests_of, "LARGE", 1 << 10)
    assert digest(torch.zeros(8)) == digest(torch.zeros(8)) != ""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail("it was copied"))
    assert digest(torch.zeros(300)) == ""


def test_a_new_notebook_gets_it_as_it_is(coming: dict[str, Any]) -> None:
    here: dict[str, Any] = {}
    assert Homecoming(here, coming, {}, "run", {}).settle() == [
        "model, table, optimizer, schedule, losses, box, seen, number, best: new"
    ]
    assert here["box"]["model"] is here["model"]
    assert here["optimizer"].param_groups[0]["params"][0] is next(here["model"].parameters())


class Fragile:
    """Cannot be made where `broken` is set."""

    broken = False

    def __init__(self) -> None:
        self.value = 1

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.value}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if Fragile.broken:
            raise ValueError("not here")
        self.value = state["value"]


def test_what_cannot_be_written_or_made_does_not_cost_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = {"lock": threading.Lock(), "fragile": [Fragile()], "also": {"it": 1}, "weights": torch.arange(4.0)}
    left = result_file.write(tmp_path, space, space)["left"]
    assert list(left) == ["lock"]
    monkeypatch.setattr(Fragile, "broken", True)
    found, unmade = result_file.read(tmp_path, {})
    assert list(unmade) == ["fragile"]
    assert "not here" in unmade["fragile"]
    assert found["also"] == {"it": 1}
    assert found["weights"].tolist() == [0, 1, 2, 3]
