"""Whatever one rank alone does to what all have is said, and all ranks have the lead's with the next cell."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel, running_kernel
from tests.support.notebook import Notebook

pytestmark = pytest.mark.thorough

SETUP = """
import collections, types, numpy as np
from nbtrain import whole
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
sch = torch.optim.lr_scheduler.StepLR(opt, 1000)
class Slotted:
    __slots__ = ("a", "held")
    def __init__(self): self.a, self.held = 1, []
class Config:
    rate, tags = 0.1, []
slotted, config = Slotted(), Config()
Pair = collections.namedtuple("Pair", "items number")
pair = Pair([1, 2], 3)
def scale(x, by=2): return x * by
scale.calls = 0
def counting():
    count = 0
    def bump():
        nonlocal count
        count += 1
        return count
    return bump
bump = counting()
tensor = torch.arange(12.).view(3, 4)
data = [(torch.randn(8, 8, generator=torch.Generator().manual_seed(i)), torch.arange(8) % 3) for i in range(2)]
"""
TRAIN = """
for x, y in data:
    F.cross_entropy(model(x), y).backward(); opt.step(); sch.step(); opt.zero_grad()
"""
READ = "model, opt, sch, slotted, config, Config, pair, scale, bump, tensor"
STATE = """
def state():
    norm = model[1]
    with whole(opt):
        averages = sum(s["exp_avg"].double().sum().item() for s in opt.state.values())
    return repr((
        [m.training for m in model.modules()], model[2].p, norm.momentum, norm.running_mean.sum().item(),
        [type(m).__name__ for m in model], [k for m in model for k in vars(m) if k[0] != "_"],
        len(list(model.buffers())),
        [p.requires_grad for p in model.parameters()], sum(p.double().sum().item() for p in model.parameters()),
        [(g["lr"], g["betas"]) for g in opt.param_groups], len(opt.state), averages, sch.last_epoch,
        slotted.a, slotted.held, Config.rate, Config.tags, [k for k in vars(Config) if k[0] != "_"],
        config.__dict__, pair.items,
        scale.calls, scale.__defaults__, bump.__closure__[0].cell_contents,
        tensor.requires_grad, tensor.stride(), tensor.tolist()))
"""
EDITS = {
    "data": "model[0].weight.data.add_(1)",
    "numpy": "model[0].weight.detach().numpy()[0] = 7",
    "detach": "model[3].bias.detach().zero_()",
    "running statistics": "model[1].running_mean.add_(1)",
    "eval": "model.eval()",
    "dropout": "model[2].p = 0.9",
    "momentum": "model[1].momentum = 0.5",
    "frozen": "model.requires_grad_(False)",
    "attribute": "model[0].note = 'here'",
    "buffer": "model.register_buffer('mask', torch.ones(2))",
    "no bias": "model[3].bias = None",
    "layer replaced": "model[3] = nn.Linear(8, 3)",
    "layer appended": "model.append(nn.ReLU())",
    "rate": "opt.param_groups[0]['lr'] = 0.5",
    "betas": "opt.param_groups[0]['betas'] = (0.5, 0.5)",
    "states": "next(iter(opt.state.values()))['exp_avg'].zero_()",
    "a state gone": "del opt.state[model[0].weight]",
    "no states": "opt.state.clear()",
    "schedule": "sch.last_epoch = 17",
    "slots": "slotted.a = 2",
    "in slots": "slotted.held.append(1)",
    "class": "Config.rate = 5",
    "new in class": "Config.more = 1",
    "in class": "Config.tags.append(1)",
    "instance": "config.own = 1",
    "in a named tuple": "pair.items.append(1)",
    "attribute of a function": "scale.calls += 1",
    "default": "scale.__defaults__ = (3,)",
    "closure": "bump()",
    "requires_grad": "tensor.requires_grad_()",
    "transposed": "tensor.t_()",
    "tensor": "tensor.numpy()[0] = 9",
}  # fmt: skip


@pytest.fixture(scope="module")
def own_kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        yield kernel


DIVIDED = {"states": "write `with whole(optimizer):`", "a state gone": "the ranks no longer hold the same weights"}
"""Under zero1, which divides the states among the ranks, one alone cannot edit them."""


@pytest.fixture(params=["ddp", "zero1"])
def notebook(own_kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[Notebook]:
    made = Notebook(own_kernel)
    made.strategy, made.line = request.param, f"%%distributed -d 2 -s {request.param} --monitor off\n"
    yield made
    made("%distributed stop")


@pytest.mark.parametrize("who", [0, 1])
def test_what_one_rank_edits_is_said_and_corrected(notebook: Notebook, who: int) -> None:
    """All of them in one kernel, one after the other, and each starts afresh."""
    wrong = []
    notebook(STATE)
    for name, edit in EDITS.items():
        notebook(SETUP)
        assert "differ" not in notebook(notebook.line + TRAIN).text, name
        assert "differ" not in notebook(f"{notebook.line}{READ};").text, name
        edited = f"{notebook.line}{READ}\nif rank == {who}:\n    {edit}"
        if notebook.strategy == "zero1" and name in DIVIDED:
            assert DIVIDED[name] in str(notebook.fails(edited))
            continue
        said = notebook(edited).text
        if "differ" not in said or "the order of batches" in said:
            wrong.append((name, "said", said[-300:]))
        ranks = notebook(f"{notebook.line}{READ}\nfor each in gather(state()): print('state:', each)").stdout
        each = [line for line in ranks.splitlines() if line.startswith("state:")]
        home = notebook("print('state:', state())").stdout.strip()
        if set(each) != {home}:
            wrong.append((name, "not corrected", sorted({*each, home})))
        again = notebook(f"{notebook.line}{READ}; print('no word')").text
        if "differ" in again:
            wrong.append((name, "said again", again[-300:]))
    assert not wrong, "\n".join(map(str, wrong))


SAME = (
    "rows.append({'epoch': 1, 'loss': 0.5})", "table['t'] = torch.ones(3)", "rows.append([3])", "rows.append(other)",
    "table['net'] = nn.Linear(2, 2)", "table['pair'] = (1, [2])", "pairs.reverse()",
    "net.weight.register_hook(lambda g: g * 2);", "rows.append(net.weight.register_hook(lambda g: g * 2))",
)  # fmt: skip
OTHERS = (
    "rows.append([rank])", "table['t'] = torch.full((3,), float(rank))", "pairs.reverse() if rank else None",
    "table['pair'] = (1, [rank])", "rows.append(pairs[rank])",
    "net.weight.register_hook(lambda g, by=rank: g * by);", "if rank: net.weight.register_hook(lambda g: g * 2)",
)  # fmt: skip


def test_new_objects_in_lists_and_dicts_are_compared_by_what_is_in_them(own_kernel: Kernel) -> None:
    """The notebook's were empty, say: the lead's have keys by then, and others' have none."""
    notebook = Notebook(own_kernel)
    for cells, told in ((SAME, False), (OTHERS, True)):
        for cell in cells:
            notebook("rows, table, other, pairs, net = [], {}, [5], [[1], [2]], nn.Linear(2, 2)")
            shown = notebook(f"%%distributed -d 2 --monitor off\n{cell}").text
            assert ("values differ across ranks: " in shown) == told, f"{cell}\n{shown}"
            again = notebook("%%distributed -d 2 --monitor off\nrows, table, other, pairs, net;").text
            assert "values differ" not in again, f"{cell}\n{again}"
    notebook("%distributed stop")
