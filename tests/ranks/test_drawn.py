"""What a cell draws for a weight after its first batch is on every rank what one process draws."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from nbtrain import registry
from tests.fuzz.player import Player
from tests.fuzz.verdicts import judge

NOTEBOOK = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(11)
loader = DataLoader(TensorDataset(torch.randn(32, 6), torch.randint(3, (32,))), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
result = {}
"""
LOOP = """
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        [grad]
        opt.step()
        opt.zero_grad()
        [step]
[end]
"""
EDITS = {
    "a layer drawn anew": {"step": "if i == 1: model[0].reset_parameters()"},
    "nn.init after training": {"end": "nn.init.orthogonal_(model[0].weight); nn.init.trunc_normal_(model[2].weight)"},
    "noise on weights": {"step": "with torch.no_grad(): model[2].weight.add_(0.1 * torch.randn_like(model[2].weight))"},
    "a part through data": {"step": "model[2].bias.data[1:].uniform_(-1, 1)"},
    "weights with other memory": {"step": "model[0].bias.data = torch.zeros(4); model[0].bias.data.normal_()"},
    "models made between": {
        "step": "if epoch and i: other = nn.Linear(6, 4)",
        "end": "del other; nn.init.normal_(model[0].weight)",
    },
}
GRADIENTS = {"noise on gradients": {"grad": "for p in model.parameters(): p.grad.add_(torch.randn_like(p.grad))"}}
WHOLE = [name for name in ("ddp", "zero1", "horovod") if all(map(find_spec, registry.strategy(name).needs.packages))]
CASES = [(name, edit) for name in WHOLE for edit in (*EDITS, *GRADIENTS)]
CASES += [("sharded", edit) for edit in EDITS if find_spec("fairscale")]


def cells(edit: str) -> list[tuple[bool, str]]:
    text = LOOP
    for place in ("grad", "step", "end"):
        text = text.replace(f"[{place}]", {**EDITS, **GRADIENTS}[edit].get(place, "pass"))
    return [(False, NOTEBOOK), (True, text + "pass")]


@pytest.mark.thorough
@pytest.mark.limit(240)
def test_what_is_drawn_for_a_weight(one_process: Player) -> None:
    apart = []
    with Player("ddp") as ranks:
        for ranks.strategy, edit in CASES:
            alone = one_process.play(cells(edit))
            assert alone[-1].error is None, alone[-1].error
            found = judge(alone, alone, ranks.play(cells(edit)))
            if found.word != "right":
                apart.append(f"{ranks.strategy}, {edit}: {found.word} {found.why}")
    assert not apart, "\n".join(apart)
