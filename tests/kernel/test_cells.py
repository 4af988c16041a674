"""A cell as its user means it: what comes home, into which objects, and that one process would have made the same."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from tests.support.absent import absent
from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, TRAIN, Notebook

pytestmark = pytest.mark.kernel


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    """Ranks of its own for each test; the process they are forked from stays warm."""
    made = Notebook(shared_kernel)
    yield made
    made("%distributed stop")


def test_two_cells_train_the_notebooks_own_objects_as_one_process_would(notebook: Notebook) -> None:
    notebook("""
import copy
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)
    def forward(self, x):
        return self.head(self.body(x))
def parts(model):
    model.body[1].eval()  # statistics of half a batch are not those of a whole one
    groups = [{'params': model.body.parameters()}, {'params': model.head.parameters(), 'lr': 3e-2}]
    opt = torch.optim.AdamW(groups, 1e-2)
    return opt, torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
model = Net(); other = copy.deepcopy(model)
opt, sched = parts(model); opt1, sched1 = parts(other)
loader = DataLoader(data, batch_size=16, shuffle=True)
losses = []
mine = [model, opt, sched, losses, loader, *model.parameters(), *model.buffers(), *opt.param_groups]
ids = list(map(id, mine))
torch.manual_seed(7)""")
    for _ in range(2):
        notebook("""%%distributed --devices 2 --split-batches
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad(); sched.step()
    losses.append(reduce(loss).item())""")
    notebook("""
after = torch.get_rng_state()
torch.manual_seed(7)
alone = []
for _ in range(2):
    for a, b in loader:
        one = F.cross_entropy(other(a), b)
        one.backward(); opt1.step(); opt1.zero_grad(); sched1.step()
        alone.append(one.item())
for (name, p), q in zip(model.named_parameters(), other.parameters()):
    assert torch.allclose(p, q, atol=1e-5), (name, (p - q).abs().max())
assert torch.allclose(torch.tensor(losses), torch.tensor(alone), atol=1e-5), (losses, alone)
assert len(losses) == 12
assert torch.equal(after, torch.get_rng_state())
for p, q in zip(opt.state.values(), opt1.state.values()):
    assert torch.allclose(p['exp_avg_sq'], q['exp_avg_sq'], atol=1e-6) and p['step'] == q['step'] == 12
assert sched.state_dict() == sched1.state_dict(), (sched.state_dict(), sched1.state_dict())
assert [g['lr'] for g in opt.param_groups] == [g['lr'] for g in opt1.param_groups]
now = [model, opt, sched, losses, loader, *model.parameters(), *model.buffers(), *opt.param_groups]
assert list(map(id, now)) == ids
""")


def test_names_come_and_go(notebook: Notebook) -> None:
    notebook("gone = 1; kept = 2; untouched = object(); before = id(untouched)")
    notebook("%%distributed --devices 2\nfresh = kept + 1; kept = [fresh]; del gone\ntensor = torch.arange(3)")
    notebook("""
assert fresh == 3 and kept == [3] and tensor.tolist() == [0, 1, 2] and id(untouched) == before
assert 'gone' not in globals() and 'rank' not in globals()""")
    notebook("%%distributed --devices 2\nassert 'gone' not in globals() and tensor.tolist() == [0, 1, 2]\ntensor += 1")
    notebook("assert tensor.tolist() == [1, 2, 3]")


def test_a_helper_sees_the_model_that_is_trained(notebook: Notebook) -> None:
    notebook(
        TRAIN
        + """
def accuracy():
    with torch.no_grad():
        return (model(X).argmax(1) == Y).float().mean().item()
def fit(epochs):
    for _ in range(epochs):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
first = accuracy()"""
    )
    notebook("%%distributed --devices 2\nfit(8)\nthere = accuracy()")
    notebook("assert there == accuracy() > max(first, 0.8), (first, there, accuracy())")


def test_one_rank_and_then_all_again(notebook: Notebook) -> None:
    notebook(TRAIN + "\nseen = []; table = {}")
    notebook("%%distributed --devices 2" + LOOP)
    shown = notebook("%%rank 1\nseen.append(rank); table['x'] = torch.ones(2); only = rank\nprint('here', rank)")
    assert "here 1" in shown.stdout
    assert "here 0" not in shown.stdout
    assert "on rank 1 only" in shown.text
    notebook("assert seen == [1] and only == 1 and table['x'].tolist() == [1, 1]")
    notebook("%%distributed --devices 2\nvalues = gather((list(seen), table['x'].sum().item(), only))" + LOOP)
    notebook("assert values == [([1], 2.0, 1)] * 2, values")


def test_a_model_made_in_the_cell_is_set_up_with_its_optimizer(notebook: Notebook) -> None:
    notebook(TRAIN)
    notebook(
        f"%%distributed --devices 2\nmodel = net(); opt = adamw(model)\n{LOOP}\nsums = model[0].weight.sum().item()"
    )
    notebook("assert sums == model[0].weight.sum().item()")
    said = notebook(f"%%distributed --devices 2\n{LOOP}\nsums = gather(model[0].weight.sum().item())").stdout
    assert "model" not in said, said
    notebook("assert sums[0] == sums[1] == model[0].weight.sum().item()")


def test_loaders_are_shared_out_after_any_change_of_strategy(notebook: Notebook) -> None:
    notebook("loader = DataLoader(torch.arange(40), batch_size=2, shuffle=True); seen = []")
    collect = "mine = [i for batch in loader for i in batch.tolist()]\nseen.append(sorted(sum(gather(mine), [])))"
    for options in ("", "-s ddp --bucket-mb 10", "-s none", "-s ddp", "-s ddp --bucket-mb 5"):
        notebook(f"%%distributed {options} --devices 2\n{collect}")
        copies = 2 if "none" in options else 1
        notebook(f"assert seen[-1] == sorted([*range(40)] * {copies}), seen[-1]")


@pytest.mark.parametrize("where", ["--devices 1", "--engine inprocess"])
def test_ddp_on_one_device_is_one_process(notebook: Notebook, where: str) -> None:
    notebook(TRAIN)
    clipped = LOOP.replace("opt.step()", "nn.utils.clip_grad_norm_(model.parameters(), 1.0); opt.step()")
    notebook(f"%%distributed -s ddp {where}" + clipped)
    notebook(f"%%distributed -s ddp --accumulate 3 {where}" + clipped)
    notebook("assert opt.state[model[0].weight]['step'] == 6 + 2")


def test_flags_and_edits_of_a_strategy_of_the_notebook_count(notebook: Notebook) -> None:
    notebook(TRAIN)
    define = """
from dataclasses import dataclass
from nbtrain.strategies.ddp import DDP
class Mine(DDP):
    @dataclass(frozen=True, kw_only=True)
    class Options(DDP.Options):
        k: int = 1
        j: int = 1
    def set_up(self, component, precision="32"):
        print('WORD', self.options.k, self.options.j)
        return super().set_up(component)
"""
    notebook(define.replace("WORD", "old") + "mine = Mine(Mine.Options(k=2, j=3))")
    cell = " --devices 2\nmodel"
    assert "old 2 3" in notebook("%%distributed -s mine" + cell).stdout
    assert "old" not in notebook("%%distributed -s mine" + cell).text, "set up already"
    assert "old 5 3" in notebook("%%distributed -s mine --k 5" + cell).stdout
    assert "old 5 3" in notebook("%%distributed -s mine --k 5 --engine inprocess\nmodel").stdout
    assert "old 1 1" in notebook("%%distributed -s Mine" + cell).stdout
    notebook(define.replace("WORD", "new"))
    assert "new 1 1" in notebook("%%distributed -s Mine" + cell).stdout
    assert "old 2 3" in notebook("%%distributed -s mine" + cell).stdout, "an object keeps its class, as in Python"
    notebook("mine = Mine(Mine.Options(k=2, j=3))")
    assert "new 2 3" in notebook("%%distributed -s mine" + cell).stdout


@pytest.mark.thorough
@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_other_ways_to_start_ranks(start: str, kernel: Kernel) -> None:
    kernel.run("import torch; torch.set_num_threads(1)")
    notebook = Notebook(kernel)
    notebook(TRAIN + "\nlosses = []; w = model[0].weight; before = w.detach().clone()")
    cell = f"%%distributed --devices 2 --start {start}" + LOOP + "    losses.append(loss.item())\nprint('on', rank)"
    for cells in (1, 2):
        began = time.monotonic()
        shown = notebook(cell)
        if time.monotonic() - began > 6:  # so that the ranks took more than two
            assert shown.stdout.startswith("starting 2 ranks …\n")
        assert "ddp · 2 ranks" in shown.text
        assert "on 0" in shown.stdout
        notebook(f"assert len(losses) == {3 * cells} and opt.state[w]['step'] == {3 * cells}")
        notebook("assert model[0].weight is w and not torch.equal(w, before)")
    if start == "fork":
        notebook("import threading; lock = threading.Lock()")  # needs no pickling: it is there all the same
        notebook("%%distributed --devices 2 --start fork\nwith lock: held = True")
        notebook("assert held")


def test_what_the_notebook_lets_go_is_let_go(notebook: Notebook) -> None:
    notebook(TRAIN + "\nimport gc, weakref\nalive = weakref.ref(model); weight = weakref.ref(model[0].weight)")
    notebook("%%distributed --devices 2" + LOOP)
    notebook("del model, opt, loss")
    notebook("gc.collect()")
    notebook("assert alive() is None and weight() is None")


@pytest.mark.thorough
def test_a_model_that_the_cell_compiled_comes_home(notebook: Notebook) -> None:
    """By torch.compile's default, which leaves functions of its own in the namespace of the ranks."""
    if shutil.which("g++") is None:
        absent("no C++ compiler", "apt-get install g++")
    notebook(f"{TRAIN}; own = model; w = model[0].weight")
    line = "%%distributed --devices 2\n"
    notebook(f"{line}model = torch.compile(model)\n{LOOP}", timeout=120)
    notebook("assert model._orig_mod is own and own[0].weight is w and type(model) is not type(own)")
    notebook("before = w.clone()\nnames = [n for n in globals() if n.startswith('__compiled')]")
    notebook(f"{line}{LOOP}", timeout=120)
    notebook("assert not torch.equal(before, w) and not names")
