"""A model that a cell trains on ranks, and a copy of it that one process trains: they are to be the same."""

from __future__ import annotations

from nbtrain.machine import registry
from tests.support.notebook import LOOP, Notebook

RANKS = "--devices 2 --split-batches"
WAYS = {
    **{name: f"--strategy {name} {RANKS}" for name in registry.STRATEGIES},
    "none": "--strategy none --devices 2",  # each rank does all of it
    "single": "--strategy single --devices 1",
    **{f"deepspeed {stage}": f"--strategy deepspeed --stage {stage} {RANKS}" for stage in (1, 3)},
}
"""deepspeed alone is stage 2."""
ACCURACY = 1e-5
TRAINING = """
import copy
torch.manual_seed(0)
model = net(); opt = torch.optim.AdamW(model.parameters(), 0.01); loader = DataLoader(data, batch_size=16)
own = [model, opt, *model.parameters()]
alone = copy.deepcopy((model, opt)); first = copy.deepcopy(model)
"""
ALONE = LOOP.replace("model", "alone[0]").replace("opt.", "alone[1].")
FAR = """max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone[0].parameters()))"""
CAME_HOME = """
assert all(a is b for a, b in zip(own, [model, opt, *model.parameters()], strict=True))
assert type(model) is nn.Sequential
assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), model.parameters()))
state = [(opt.state[p], alone[1].state[q]) for p, q in zip(model.parameters(), alone[0].parameters())]
assert all(int(a.get('step', 6)) == 6 for a, _ in state)
assert all(torch.allclose(a['exp_avg'], b['exp_avg'], atol=1e-5) for a, b in state if 'exp_avg' in b)
"""


def trains_as_one_process(notebook: Notebook, way: str) -> None:
    """After TRAINING: two cells, the second from what came home of the first."""
    for seconds in (120, 60):
        run = notebook(f"%%distributed {WAYS[way]}\n{LOOP}", seconds)
        assert "differs from rank" not in run.text
        notebook(ALONE)
        if seconds == 120:
            notebook(CAME_HOME)
        far = float(notebook(FAR).value or "inf")
        assert far < ACCURACY, f"{way}: one process has other weights, by {far}"
