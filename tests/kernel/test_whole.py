"""`with whole(…)` as a user meets it: what is refused and in which words, Stop, too little memory, what comes home."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain.machine import registry
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

BEGIN = """
model = net(); opt = torch.optim.AdamW(model.parameters(), 1e-2); loader = DataLoader(data, batch_size=16)
def step(x, y):
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
"""
CELL = "%%distributed -s {} -d 2 --monitor off\nfor x, y in loader: step(x, y)\n{}"
REFUSED = {
    "with whole(3): pass": "whole() takes modules, parameters and optimizers, not int: with whole(model)",
    "with whole(open): pass": "not builtin_function_or_method",
    "if rank == 0:\n    with whole(model): pass\nfor x, y in loader: step(x, y)": "rank 0 is in `with whole(…)`",
    "with whole(model[0] if rank else model): pass": "the ranks name different objects in `with whole(…)`",
    "with whole(model), torch.no_grad(): model[0].weight.mul_(rank + 1)": "different numbers of model.0.weight",
    "with whole(model): model(x).sum().backward()": "loss.backward() inside of `with whole(…)`",
    "with whole(model): loss = model(x).sum()\nloss.backward()": "computed of weights inside of `with whole(…)`",
    "def pre(o, a, k):\n    with whole(model): model[2].requires_grad_(False)\nopt.register_step_pre_hook(pre)\n"
    "for x, y in loader: step(x, y)": "in a hook of optimizer.step()",
    "with whole(model, gradients=True): model[2].bias.grad = torch.ones(2)": "was given a gradient inside of",
    "with whole(model): opt.step()": "optimizer.step() inside of `with whole(…)`",
    "with whole(model): save('kept')": "save() inside of `with whole(…)`",
    "with whole(model): setup(net())": "setup() inside of `with whole(…)`",
    "with whole(model[0]): model(x)": "model.2.weight is in pieces here: `with whole(…)` names other tensors",
    "with whole(opt):\n    with whole(model, gradients=True): pass": "averaged before the outermost one. Say it there",
    "with whole(model, opt):\n    if rank: opt.state.clear()": "the ranks have changed different things",
    "s = opt.state[model[0].weight]\nwith whole(s['exp_avg' if rank else 'exp_avg_sq']): pass": "different objects",
    "with whole(opt):\n    opt.state[model[2].bias]['exp_avg'] = torch.full((2,), 1.0 + rank)": "a layer or a state",
    "with whole(model, opt): model[2] = nn.Linear(8, 2); model[2].bias.data.fill_(rank)": "a layer or a state",
    "with whole(model): model[2].bias.data = model[0].bias.data[:2]": "was given the memory of model.0.bias",
    "with whole(model):\n    if rank: model[0].bias.data = torch.ones(1)": "the ranks have changed different things",
    "with whole(model):\n    if rank: model[0].bias.grad = torch.ones(8)": "the ranks have changed different things",
    "w = model[0].weight.detach().numpy()\nwith whole(model): w *= 0.9": "read-only. If the array was made of a weight",
    "held = [torch.zeros_like(p) for p in model.parameters()]\nwith whole(model): held[0].add_(model[0].weight)": (
        "torch.zeros_like(p), p.detach() and model.state_dict() make them: make it in such a block, too"
    ),
    "F.cross_entropy(model(X), Y).backward()\nwith whole(model, gradients=True): g = model[0].bias.grad\n"
    "g.mul_(0.5); opt.step()": "the gradient of model.0.bias was taken out of",
    "def f():\n    with whole(model): w = model[0].weight\n    w.data.mul_(2)\nf()": "a tensor of model.0.weight",
    "def f():\n    with whole(model): w = model[0].weight.data[1]\n    w.norm()\nf()": "read it from the model",
    "with whole(model): model.double()": "was given another shape or dtype inside of `with whole(…)`",
}


@pytest.fixture
def nb(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook(BEGIN)
    yield notebook
    notebook("%distributed stop")


def test_what_a_block_cannot_do_is_one_sentence_and_no_hang(nb: Notebook) -> None:
    for text, sentence in REFUSED.items():
        nb("model = net(); opt = torch.optim.AdamW(model.parameters(), 1e-2)")
        error = nb.fails(CELL.format("fsdp", text))
        assert sentence in error.evalue, (text, error.evalue)
    error = nb.fails(
        "%%distributed -s fsdp -d 2\nF.cross_entropy(model(X), Y).backward()\nwith whole(model): model[0].weight.grad"
    )
    assert "with whole(…, gradients=True)" in error.evalue
    error = nb.fails(CELL.format("fsdp --accumulate 2", "with whole(model, gradients=True): pass"))
    assert "leave --accumulate out" in error.evalue


@pytest.mark.parametrize("strategy", ["pipeline", "deepspeed_stage_3"])
def test_a_backward_below_of_a_forward_inside_is_one_sentence(nb: Notebook, strategy: str) -> None:
    if not all(map(find_spec, registry.strategy(strategy.split("_")[0]).needs.packages)):
        pytest.skip(f"{strategy} is not installed")
    error = nb.fails(CELL.format(strategy, "with whole(model): loss = model(x).sum()\nloss.backward()"))
    assert "computed of weights inside of `with whole(…)`" in error.evalue, error.evalue


@pytest.mark.parametrize("strategy", ["sharded", "fsdp", "pipeline"])
def test_a_gradient_that_one_rank_leaves_out_is_said(nb: Notebook, strategy: str) -> None:
    """Zeros and none have the same bits; the step is another."""
    before = "F.cross_entropy(model(X), Y).backward()\nwith whole(model, gradients=True):\n    "
    text = "model[0].weight.grad = None if rank else torch.zeros_like(model[0].weight)\nopt.step()"
    error = nb.fails(f"%%distributed -s {strategy} -d 2 --monitor off\n{before}{text}")
    assert "the ranks have changed different things" in error.evalue, error.evalue


@pytest.mark.parametrize("strategy", ["fsdp", "sharded", "deepspeed_stage_2", "deepspeed_stage_3", "pipeline"])
def test_what_shows_a_weight_of_before_is_the_weight_inside_or_refused(nb: Notebook, strategy: str) -> None:
    """In one process it is."""
    if not all(map(find_spec, registry.strategy(strategy.split("_")[0]).needs.packages)):
        pytest.skip(f"{strategy} is not installed")
    edit = CELL.format(strategy, "with whole(model), torch.no_grad(): w.mul_(0.9); assert w.equal(model[0].weight)")
    nb("w = model[0].weight.detach()")
    if strategy in ("fsdp", "pipeline"):
        error = nb.fails(edit)
        assert "made outside of `with whole(…)`" in error.evalue, error.evalue
    else:
        nb(edit)
    if strategy == "deepspeed_stage_3":
        error = nb.fails(CELL.format(strategy, "sd = model.state_dict()\nwith whole(model): sd['0.weight'].norm()"))
        assert "taken from 0.weight before" in error.evalue


@pytest.mark.parametrize("strategy", ["zero1", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_what_shows_a_weight_of_the_cell_shows_it_inside(nb: Notebook, strategy: str) -> None:
    if not all(map(find_spec, registry.strategy(strategy.split("_")[0]).needs.packages)):
        pytest.skip(f"{strategy} is not installed")
    text = "w = model[0].weight.detach()\nfor _ in range(2):\n    with whole(model), torch.no_grad(): w.mul_(0.9)\n"
    nb(CELL.format(strategy, f"{text}    assert torch.equal(w, model[0].weight)"))
    if strategy == "deepspeed_stage_3":
        error = nb.fails(CELL.format(strategy, "w = model[0].weight.data[1]\nwith whole(model[2]): w.mul_(0.9)"))
        assert "0.weight is in pieces here" in error.evalue, error.evalue


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_in_the_middle_of_a_forward_is_one_sentence(nb: Notebook, strategy: str) -> None:
    hook = "def look(m, a, o):\n    with whole(m): m.weight.norm()\nmodel[0].register_forward_hook(look)\n"
    error = nb.fails(CELL.format(strategy, f"{hook}F.cross_entropy(model(X), Y).backward()"))
    assert "in the middle of a model's forward or backward" in error.evalue, error.evalue


@pytest.mark.parametrize("strategy", ["zero1", "fsdp", "pipeline"])
def test_gradients_of_a_model_in_16_bits(nb: Notebook, strategy: str) -> None:
    nb("opt = torch.optim.SGD(model.parameters(), 1.0); before = [p.detach().clone() for p in model.parameters()]")
    text = "for p in model.parameters(): p.grad.clamp_(0.5, 0.5)"
    cell = f"F.cross_entropy(model(X), Y).backward()\nwith whole(model, gradients=True):\n    {text}\nopt.step()"
    nb(f"%%distributed -s {strategy} -d 2 --monitor off --precision bf16-true\n{cell}")
    nb("assert all(torch.allclose(q - p, torch.tensor(0.5), atol=0.01) for p, q in zip(model.parameters(), before))")


def test_on_some_ranks_it_is_refused_and_outside_of_cells_it_does_nothing(nb: Notebook) -> None:
    nb(CELL.format("fsdp", ""))
    assert "needs every rank, and %%rank runs" in nb.fails("%%rank 0\nwith whole(model): pass").evalue
    nb("import nbtrain\nwith nbtrain.whole(model) as same, torch.no_grad(): same[0].bias.fill_(2)")
    assert "not int" in nb.fails("with nbtrain.whole(3): pass").evalue
    nb("%%distributed -s fsdp -d 2\nwith whole(X) as held: assert held is X and float(model[0].bias.sum()) == 16")


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_stop_inside_leaves_the_notebook_as_it_was(nb: Notebook, strategy: str) -> None:
    nb("before = [p.detach().clone() for p in model.parameters()]")
    text = "import time\nwith whole(), torch.no_grad():\n    model[0].weight.zero_(); print('inside'); time.sleep(600)"
    cell = nb.kernel.start(f"%%distributed -s {strategy} -d 2 --monitor off\n{text}")
    nb.kernel.wait_for(lambda: "inside" in cell.stdout, 60)
    nb.kernel.interrupt()
    nb.kernel.wait(cell, 60)
    nb("assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))")
    nb(CELL.format(strategy, "with whole(), torch.no_grad(): model[0].weight.fill_(0.5)"))
    nb("assert bool((model[0].weight == 0.5).all())")


def test_without_memory_it_says_to_name_a_part(nb: Notebook) -> None:
    nb("big = nn.Sequential(nn.Linear(4096, 8192), nn.ReLU(), nn.Linear(8192, 4096), nn.Linear(4096, 8))")
    text = """
import resource
def within(room):
    had, used = resource.getrlimit(resource.RLIMIT_DATA), int(open("/proc/self/statm").read().split()[5]) * 4096
    resource.setrlimit(resource.RLIMIT_DATA, (used + room, had[1]))
    return had
sgd = torch.optim.SGD(big.parameters(), 0.1)
had = within(160 << 20)
try:
    with whole(big[3]): ok = float(big[3].weight.abs().sum()) > 0
    with whole(big): pass
finally: resource.setrlimit(resource.RLIMIT_DATA, had)"""
    error = nb.fails(f"%%distributed -s fsdp -d 2 --monitor off\n{text}", timeout=120)
    assert "not enough memory for all that `with whole(…)` names" in error.evalue, error.evalue
    assert "name a part, with whole(model.head)" in error.evalue


def test_what_was_changed_comes_home_and_the_loop_goes_on(nb: Notebook) -> None:
    nb(
        CELL.format(
            "fsdp",
            "kept = {}\n"
            "with whole(model, opt), torch.no_grad():\n"
            "    model[0].weight.copy_(torch.linalg.qr(model[0].weight)[0])\n"
            "    opt.state[model[2].bias]['exp_avg'].fill_(0.25)\n"
            "    kept['norm'] = float(model[0].weight.norm())\n"
            "    twin = copy.deepcopy(model)\n",
        ).replace("for x", "import copy\nfor x", 1)
    )
    nb("assert bool((opt.state[model[2].bias]['exp_avg'] == 0.25).all())")
    nb("assert abs(kept['norm'] - 2) < 1e-4 and torch.equal(twin[0].weight, model[0].weight)")
    nb(CELL.format("ddp", "with whole(model, gradients=True): pass"))
