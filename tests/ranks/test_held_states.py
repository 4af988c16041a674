"""States that a cell reads, keeps, edits and loads by hand, and hooks of an optimizer: as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.fuzz.sessions import Live, live
from tests.lines.playing import numbers

STRATEGIES = ("ddp", "zero1", "fsdp", "pipeline")
START = """
import copy, io, torch, torch.nn as nn, torch.nn.functional as F
from collections import defaultdict
from nbtrain import whole
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
X = torch.randn(48, 4); Y = (X.sum(1) > 0).long()
loader = DataLoader(TensorDataset(X, Y), batch_size=8)
torch.manual_seed(1)
m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
result = text = h = None
calls = []
def epoch(steps=2):
    for i, (x, y) in enumerate(loader):
        if i < steps:
            o.zero_grad(); F.cross_entropy(m(x), y).backward(); o.step()
"""
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(m.parameters(), 0.05, momentum=0.9)",
    "Adam": "torch.optim.Adam(m.parameters(), 0.01)",
    "AdamW": "torch.optim.AdamW(m.parameters(), 0.01, amsgrad=True)",
    "Adagrad": "torch.optim.Adagrad(m.parameters(), 0.01)",
    "NAdam": "torch.optim.NAdam(m.parameters(), 0.01)",
}
ROLL_BACK = """
epoch()
od, md = copy.deepcopy(o.state_dict()), copy.deepcopy(m.state_dict())
epoch(3)
o.load_state_dict(od); m.load_state_dict(md)
epoch()
kept = copy.deepcopy(o.state_dict())
o.load_state_dict(kept)
epoch(1)
result = [od, md, kept]
"""
EACH = "for p in m.parameters(): "
INSIDE = f"with whole(o):\n    {EACH}"
Cells = tuple[str, ...]
"""Those that begin with a % run on the ranks."""
EDITS: dict[str, Cells] = {
    "zeroed": (f"%epoch()\n{INSIDE}o.state[p]['exp_avg'].zero_()\nepoch()",),
    "scaled at the end": (f"%epoch()\n{INSIDE}o.state[p]['exp_avg_sq'].mul_(2)", "%epoch()"),
    "cleared": ("%epoch()", "%epoch(1); o.state.clear(); epoch()", "epoch(1)"),
    "another dict": ("%epoch(); o.state = defaultdict(dict); epoch()", "%epoch(1)"),
    "deleted": ("%epoch(); del o.state[m[0].weight]; epoch()", "%epoch(1)"),
    "replaced": (f"%epoch()\n{INSIDE}o.state[p]['exp_avg'] = o.state[p]['exp_avg'] * 0.5\nepoch()",),
    "read": (
        "%epoch()\nwith whole(o): result = [float(o.state[p]['exp_avg'].norm()) for p in m.parameters()]\nepoch()",
    ),
    "of one's own": (f"%epoch(1)\n{EACH}o.state[p]['x'] = torch.full_like(p, 2.); o.state[p]['age'] = 1\nepoch()",),
    "held from before": (
        "epoch(); e = o.state[m[2].weight]",
        "%epoch(1)\nwith whole(o): e['exp_avg'].zero_()\nepoch(1); o.state = defaultdict(dict); epoch(1); result = [e]",
    ),
    "a dict of the notebook": (
        "epoch(); od = copy.deepcopy(o.state_dict())",
        "%epoch(); od2 = copy.deepcopy(od); o.load_state_dict(od2); epoch(1); result = [od]",
    ),
    "a dict of an earlier cell": (
        "%epoch(); od = copy.deepcopy(o.state_dict())",
        "%epoch()",
        "%o.load_state_dict(od); epoch(1); result = [od]",
    ),
    "two dicts of the notebook in turn": (
        "%epoch()",
        "od = copy.deepcopy(o.state_dict())",
        "%epoch()",
        "od2 = copy.deepcopy(o.state_dict())",
        "%o.load_state_dict(od); epoch(1)",
        "%o.load_state_dict(od2); epoch(1)",
        "%o.load_state_dict(od); epoch(1); result = [od, od2]",
    ),
    "two dicts of a cell in turn": (
        "%epoch(); od = copy.deepcopy(o.state_dict()); epoch(1); o.load_state_dict(od); epoch(1)",
        "%epoch(1); od2 = copy.deepcopy(o.state_dict()); o.load_state_dict(od2)",
        "result = [od, od2]",
    ),
    "a dict that goes on": ("%epoch(1); od = o.state_dict(); epoch(); result = [od]",),
    "a dict that goes on, loaded": ("%epoch(1); od = o.state_dict(); epoch(); o.load_state_dict(od); epoch(1)",),
    "through a file": (
        "%b = io.BytesIO(); epoch(); torch.save(o.state_dict(), b); b.seek(0); epoch(1)\n"
        "o.load_state_dict(torch.load(b)); epoch(1); del b",
    ),
    "a file that is written once": (
        "import os, tempfile; path = tempfile.mktemp()",
        "%epoch(); torch.save(o.state_dict(), path); epoch(1); o.load_state_dict(torch.load(path)); epoch(1)",
        "os.remove(path)",
    ),
    "no state": (
        "o = torch.optim.SGD(m.parameters(), 0.05)",
        "%epoch(); text = len(o.state)",
        "text = text, len(o.state)",
    ),
    "momentum that was taken away": (
        f"o = {OPTIMIZERS['SGD']}",
        f"%epoch()\n{INSIDE}o.state[p]['momentum_buffer'] = None\nepoch()",
        "%epoch(1)",
    ),
    "keys of groups": (
        "o.param_groups[0]['scale'] = [1]; o.my = 3",
        "%epoch(1); o.param_groups[0]['scale'].append(2); o.param_groups[0]['tag'] = {'a': 1}; o.my += 1; epoch(1)",
        "text = {k: v for k, v in o.param_groups[0].items() if k != 'params'}, o.my, o.defaults",
    ),
    "another group": (
        "o = torch.optim.Adam(m[0].parameters(), 0.01)",
        "%epoch(); o.add_param_group({'params': m[2].parameters(), 'lr': 0.1, 'name': 'late'}); epoch()",
        "%epoch(1)",
    ),
}
HOOKS = {
    "step_post": ("def hook(one, *_): calls.append((one is o, len(one.param_groups[0]['params'])))", "epoch()"),
    "step_pre": ("def hook(one, *_): calls.append((one is o, len(one.param_groups[0]['params'])))", "epoch()"),
    "state_dict_post": ("def hook(one, found): calls.append(one is o); return {**found, 'own': 1}", "o.state_dict()"),
    "state_dict_pre": ("def hook(one): calls.append(one is o)", "o.state_dict()"),
    "load_state_dict_pre": ("def hook(one, given): calls.append(one is o)", "o.load_state_dict(o.state_dict())"),
    "load_state_dict_post": ("def hook(one): calls.append(one is o)", "o.load_state_dict(o.state_dict())"),
}


def played(notebook: Live, cells: Cells, ranks: bool) -> dict[str, Any]:
    notebook.clear()
    for cell in (START, f"o = {OPTIMIZERS['Adam']}", *cells):
        error = notebook.run(cell.removeprefix("%"), ranks and cell.startswith("%"))
        assert error is None, f"{error}\n{notebook.shown}"
        assert "stays on the ranks" not in notebook.shown
    own = notebook.namespace
    return {**numbers([own["m"], own["o"], own["result"]]), "text": repr(own["text"]), "calls": own["calls"]}


def same(notebook: Live, *cells: str) -> None:
    wanted, found = played(notebook, cells, False), played(notebook, cells, True)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=lambda m, at=name: f"{at}: {m}")
        else:
            assert found[name] == value


def hook_cells(kind: str) -> Iterator[Cells]:
    """Set in the notebook, set in a cell, taken off by a cell: on the ranks, and afterwards here."""
    hook, call = HOOKS[kind]
    hung = f"{hook}\nh = o.register_{kind}_hook(hook)"
    yield hung, f"%{call};", f"{call};"
    yield f"%{hung}\n{call};", f"{call};", f"h.remove(); {call};"
    yield hung, f"%{call}; h.remove()", f"{call};"


def table() -> Iterator[tuple[str, Cells]]:
    for name, made in OPTIMIZERS.items():
        yield f"{name} goes back", (f"o = {made}", "%" + ROLL_BACK, "%epoch(1)")
    yield from EDITS.items()
    for kind in HOOKS:
        yield from ((f"{kind} {i}", cells) for i, cells in enumerate(hook_cells(kind)))


@pytest.mark.thorough
@pytest.mark.limit(400)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_states_and_hooks_are_those_of_one_process(strategy: str) -> None:
    wrong = {}
    with live(f"-s {strategy} -d 2 --split-batches --monitor off") as notebook:
        for name, cells in table():
            try:
                same(notebook, *cells)
            except AssertionError as error:
                wrong[name] = str(error)
    assert wrong == {}
