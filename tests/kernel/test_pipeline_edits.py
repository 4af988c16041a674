"""Weights, gradients, buffers and states that a cell reads and edits by hand under `pipeline`: as in one process,
whichever stage has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

pytestmark = pytest.mark.kernel

START = """
import copy, torch, torch.nn as nn, torch.nn.functional as F
from nbtrain import whole
class Mine(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    @torch.no_grad()
    def step(self):
        held = [p for group in self.param_groups for p in group["params"]]
        total = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            state = self.state[p]
            state.setdefault("average", torch.zeros_like(p)).mul_(0.9).add_(p.grad / (1 + total))
            p.add_(state["average"], alpha=-0.1)
class Fails(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}"); self.code = code
class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h): return h * 1
    @staticmethod
    def backward(ctx, grad): raise Fails(2)
class Touchy(nn.Module):
    fails = ""
    def __init__(self):
        super().__init__(); self.inner = nn.Linear(8, 8)
    def forward(self, h):
        h = self.inner(h)
        if self.fails == "forward" and len(h) == 1: raise Fails(1)
        return Back.apply(h) if self.fails == "backward" else h
class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 8), Touchy(), nn.Linear(8, 8), Touchy(), nn.Linear(8, 3)])
    def forward(self, h):
        for block in self.blocks:
            h = block(h)
        return h
def chain():
    return nn.Sequential(nn.Linear(4, 8), Touchy(), nn.Linear(8, 8), Touchy(), nn.Linear(8, 3))
class Found:
    def __init__(self, logits): self.logits = logits
class Wraps(Blocks):
    def forward(self, h): return Found(super().forward(h))
class Holds(nn.Module):
    def __init__(self, first):
        super().__init__(); self.first, self.inner = first, nn.Linear(4, 4)
    def forward(self, h): return Found(self.inner(h)) if self.first else self.inner(h.logits)
torch.manual_seed(3)
batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
def fresh():
    global model, opt, out
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    out = []
def kept(value):
    if isinstance(value, (list, tuple)):
        return [one for part in value for one in kept(part)]
    if isinstance(value, dict):
        return [one for part in value.values() for one in kept(part)]
    return [torch.as_tensor(value).detach().double().clone()]
def outcome():
    return kept([list(model.parameters()), opt.state_dict()["state"], out])
"""
BACKWARD = "for x, y in batches:\n    F.cross_entropy(model(x), y).backward()\n"
STEP = "    opt.step(); opt.zero_grad()\n"
CAUGHT = """
torch.manual_seed(1); model = {model}; touchy = [m for m in model.modules() if isinstance(m, Touchy)]
opt = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in batches:
    for wrong in (x[:, :3], x[:1]):
        for one in touchy:
            one.fails = "forward"
            try: model(wrong)
            except RuntimeError: out.append(1)
            except Fails as error: out.append(1 + error.code)
            one.fails = ""
    for one in touchy:
        one.fails = "backward"
        try: F.cross_entropy(model(x), y).backward()
        except Fails as error: out.append(1 + error.code)
        x.requires_grad_()
        try: torch.autograd.grad(model(x).sum(), x)
        except Fails as error: out.append(1 + error.code)
        x.requires_grad_(False); one.fails = ""; opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
"""
HOOKS = """
torch.manual_seed(1); model = {model}; opt = torch.optim.AdamW(model.parameters(), 1e-2); seen, store = [], {{}}
last = [m for m in model.modules() if isinstance(m, Touchy)][1]
linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
handles = [m.register_forward_hook(lambda m, i, o: seen.append(o.detach())) for m in linears]
handles.append(last.inner.register_forward_hook(lambda m, i, o: store.update(h=o)))
handles.append(last.register_full_backward_hook(lambda m, i, o: store.update(g=o[0])))
for x, y in batches:
    (F.cross_entropy(model(x), y) + store["h"].square().mean()).backward()
    out.append(store["g"])
    out.append(torch.autograd.grad(model(x)[:, 1].sum(), store["h"])[0])
    opt.step(); opt.zero_grad()
while handles: handles.pop().remove()
for x, y in batches: F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
out.append(seen); store = 0
"""
DRAWN = """
torch.manual_seed(1); data = [(x[i], y[i]) for x, y in batches for i in range(8)]
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(3):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    nn.init.normal_(model[4].weight, std=0.1); model[0].reset_parameters()
    out.append(torch.rand(2))
    try: alone = rank == 0
    except NameError: alone = True
    if alone:
        with torch.random.fork_rng(): torch.randn(3)
with whole(model, opt): model[5] = nn.Linear(8, 3); model[2] = nn.Identity()
for x, y in loader: out.append(model(x)); model(x).sum().backward()
loader = data = 0
"""
EDITS = {
    "drawn after an epoch, layers replaced": DRAWN,
    "states that are thrown away": "opt = Mine(model.parameters()); held = list(model.parameters())\n" + BACKWARD + STEP
    + "    del opt.state[held[0]], opt.state[held[-1]]\n    out.append([s['average'] for s in opt.state.values()])\n"
    "held = 0\n",
    "hooks that store, in a chain": HOOKS.format(model="chain()"),
    "errors of stages that are caught": CAUGHT.format(model="chain()") + STEP,
    "errors of blocks that are caught": CAUGHT.format(model="Blocks()") + STEP,
    "weights": "torch.manual_seed(1)\n" + BACKWARD + STEP + "    with torch.no_grad():\n"
    "        for p in model.parameters():\n"
    "            p.data.add_(torch.randn_like(p), alpha=0.01); p[0] = 0; p.view(-1)[1:].mul_(0.9)\n"
    "        model[5].weight.clamp_(-0.2, 0.2)\n",
    "views that are held": "held = [p.data for p in model.parameters()]; now = model.state_dict()\n" + BACKWARD + STEP
    + "held[4].mul_(2)\nout.append([v.norm().item() for v in (*held, *now.values())])\n",
    "a vector": BACKWARD + STEP + "    v = nn.utils.parameters_to_vector(model.parameters()) * 0.9\n"
    "    nn.utils.vector_to_parameters(v, model.parameters())\n",
    "an optimizer of one's own": "opt = Mine(model.parameters())\n" + BACKWARD + STEP,
    "moved after a backward": BACKWARD + "    model.float(); model.cpu(); model.to('cpu')\n" + STEP,
    "a part by itself": BACKWARD.replace("model(x)", "model(x) + 0.1 * model[5](model[2](x[:, :1] * torch.ones(8)))")
    + STEP + "out.append(model[0](x))\n",
    "frozen, clipped": "for i, (x, y) in enumerate(batches):\n    model[4].requires_grad_(i % 2 == 0)\n"
    "    model[5].requires_grad_(i % 2 == 0)\n    F.cross_entropy(model(x), y).backward()\n"
    "    out.append([nn.utils.clip_grad_norm_(model.parameters(), 0.1, k).item() for k in (1, 2, float('inf'), 0)])\n"
    + STEP,
}  # fmt: skip


@pytest.fixture(scope="module")
def notebook(module_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(module_kernel, START)
    made("%%distributed -s pipeline -d 2\npass")
    yield made
    made("%distributed stop")


@pytest.mark.sample(first=2)
@pytest.mark.parametrize("name", EDITS)
def test_it_is_as_in_one_process(notebook: Notebook, name: str) -> None:
    notebook("fresh()")
    notebook(EDITS[name])
    notebook("wanted = outcome(); fresh()")
    notebook("%%distributed -s pipeline -d 2\n" + EDITS[name])
    shown = notebook(
        "found = outcome()\nprint(len(found) == len(wanted) > 10 and all(a.shape == b.shape and"
        " torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(found, wanted)))"
    )
    assert shown.text.strip() == "True"


REFUSED = {
    "model = nn.Sequential(Holds(True), Holds(False)); opt = torch.optim.AdamW(model.parameters())\n"
    "model(x).sum().backward()": "an object of a class of its own holds a tensor): let modules return",
    "loss = lambda w: torch.func.functional_call(model, w, (x,)).sum()\n"
    "torch.func.grad(loss)(dict(model.named_parameters()))": "`with whole(model): twin = copy.deepcopy(model)`",
    "model = chain(); opt = torch.optim.AdamW(model.parameters())\nmodel[3].fails = 'backward'\n"
    "try: model(x).sum().backward()\nexcept Fails: pass\nopt.step()": "`optimizer.zero_grad()` where the error is",
    "data = [(x[i], y[i]) for x, y in batches for i in range(8)]\n"
    "loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)\nfor epoch in range(2):\n"
    "    for x, y in loader: F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()\n"
    "    if rank == 0: noise = torch.randn(3)": "below `if rank == 0:` write `with torch.random.fork_rng():`",
    "held = model.state_dict()\nwith whole(model): [float(one.sum()) for one in held.values()]": "outside of `with",
    "if rank == 0: print(model[5].weight.norm())": "on every rank, above `if rank == 0:`",
    "h = model[5].weight.register_hook(abs)\n"
    "F.cross_entropy(model(x), y).backward()": "`with whole(model[5].weight, gradients=True): …`",
    "[p.share_memory_() for p in model.parameters()]": "Write `with whole(model[0].weight): …`",
    "torch.clamp(model[5].weight, -0.2, 0.2, out=model[5].weight)": "Write `with whole(model[5].weight): …`",
    "model[5].weight.data[0].share_memory_()": "`share_memory_` of model.5.weight, which under pipeline lies on one",
    "copies = {k: v.detach().clone() for k, v in model.named_parameters()}\n"
    "torch.func.functional_call(model, copies, (x,))": "`with whole(model): twin = copy.deepcopy(model)`",
    "torch.autograd.grad(model(x).sum(), model[0].weight)": "cannot be asked for by name",
    "model(x).sum().backward(inputs=[model[0].weight])": "cannot be asked for by name",
    "(model(x).sum() * (1 + rank)).backward()": "different losses",
    "h = model[5].weight.register_post_accumulate_grad_hook(print)\n"
    "model(x).sum().backward()": "model.5.weight has a hook on its gradient (register_post_accumulate",
    "torch.func.jacrev(model)(x)": "write `with whole(model): …` around it",
    "model = Wraps(); opt = torch.optim.AdamW(model.parameters())\nmodel(x)": "it returns a Found",
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_cannot_be_is_one_sentence(notebook: Notebook, code: str) -> None:
    notebook("fresh(); x, y = batches[0]")
    error = notebook.fails("%%distributed -s pipeline -d 2\n" + code)
    assert error.ename == "NotSupported"
    assert REFUSED[code] in error.evalue


def test_an_error_is_told_by_the_rank_whose_stage_raised_it(notebook: Notebook) -> None:
    notebook(
        "x, y = batches[0]; model = chain(); model[3].fails = 'forward'\nopt = torch.optim.AdamW(model.parameters())"
    )
    shown = notebook.kernel.run("%%distributed -s pipeline -d 2\nmodel(x[:1])").text
    assert "raised on rank 1." in shown
    assert "in Touchy.forward(self, h)" in shown
