"""What a cell makes of `torch.autograd.grad` by weights: of a rank's own share, which is said, or brought together."""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

LOOP = """
from torch.func import functional_call
def loss_of(weights, x, y):
    return F.cross_entropy(functional_call(model, parameter_and_buffer_dicts=weights, args=(x,)), y)
def asked(*args, **kwargs):
    return torch.autograd.grad(*args, **kwargs)
def together(gradients):
    return [{} for g in gradients]
def train():
    for x, y in loader:
        params = dict(model.named_parameters())
        loss = F.cross_entropy(model(x), y)
        {}
        opt.step(); opt.zero_grad()
train()
"""
ADAPTED = """
        fast = {n: w - 0.5 * g for (n, w), g in zip(start.items(), grads)}
        loss_of(fast, -x, 1 - y).backward()"""
WITH_THE_LINE = {
    "fast weights": "start = params; grads = together(asked(loss_of(params, x, y), params.values(), create_graph=True))"
    + ADAPTED,
    "of the first order": "start = params; grads = together(asked(loss_of(params, x, y), [*params.values()]))"
    + ADAPTED,
    "copies, two steps": """start = {n: p.clone() for n, p in params.items()}
        for _ in range(2):
            grads = together(asked(loss_of(start, x, y), start.values(), create_graph=True))
            start = {n: w - 0.5 * g for (n, w), g in zip(start.items(), grads)}
        loss_of(start, -x, 1 - y).backward()""",
    "detached copies": """start = {n: p.detach().clone().requires_grad_() for n, p in params.items()}
        grads = together(asked(loss_of(start, x, y), [*start.values()])); start = params"""
    + ADAPTED,
    "torch.func.grad": "start = params; grads = together(torch.func.grad(loss_of)(params, x, y).values())" + ADAPTED,
    "a penalty on scaled ones": """grads = [g / 64 for g in asked(loss * 64, model.parameters(), create_graph=True)]
        (loss + torch.cat([g.flatten() for g in together(grads)]).norm()).backward()""",
    "a penalty on all of them": """grads = asked(loss, model.parameters(), create_graph=True)
        (flat,) = together([torch.cat([g.flatten() for g in grads])])
        (loss + flat.square().sum()).backward()""",
    "projected on each other": """
        one = together(asked(loss, model.parameters(), retain_graph=True))
        other = together(asked(loss_of(params, -x, y), model.parameters()))
        for p, g, h in zip(model.parameters(), one, other): p.grad = g + h - (g * h).sum() / (h * h).sum() * h""",
}
RIGHT = {
    "put into p.grad": "for p, g in zip(params.values(), asked(loss, model.parameters())): p.grad = g.detach()",
    "scaled": "for p, g in zip(params.values(), asked(loss, [*params.values()])): p.grad = g / 2",
    "decay by hand, by a dict": """
        given = params if torch.__version__ >= "2.13" else [*params.values()]
        found = asked(loss, given)
        found = found.values() if given is params else found
        for p, g in zip(params.values(), found): p.grad = g + 0.3 * p.detach()""",
    "of two losses": """
        both = zip(asked(loss, model.parameters()), asked(loss_of(params, -x, y), model.parameters()))
        for p, (g, h) in zip(model.parameters(), both): p.grad = g + 2 * h""",
    "added": """loss.backward()
        for p, g in zip(params.values(), asked(loss_of(params, -x, y), [*params.values()])): p.grad.add_(g)""",
    "by inputs": """x.requires_grad_()
        (slope,) = asked(F.cross_entropy(model(x), y) * len(x), x, create_graph=True)
        (loss + slope.square().sum(1).mean()).backward()""",
    "of each sample": """
        each = torch.func.vmap(torch.func.grad(lambda w, x, y: loss_of(w, x[None], y[None])), (None, 0, 0))
        for n, g in each(params, x, y).items(): params[n].grad = g.detach().mean(0)""",
}
OWN = "torch.autograd.grad gives each rank the gradients of its own share of a batch"


@pytest.mark.kernel
def test_own_gradients(shared_kernel: Kernel) -> None:
    nb = Notebook(shared_kernel)
    nb("import copy; first = net(); loader = DataLoader(data, batch_size=16)")
    anew = "model = copy.deepcopy(first); opt = torch.optim.SGD(model.parameters(), 0.1)\n"
    same = "all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), wanted.parameters()))"
    for what, body in {**WITH_THE_LINE, **RIGHT}.items():
        nb(anew + LOOP.format("g", body) + "wanted = model")
        lines = {"g": "False\n", "reduce(g)": "True\n"} if what in WITH_THE_LINE else {"g": "True\n"}
        for line, right in lines.items():
            nb(anew)
            shown = nb("%%distributed -d 2 -s ddp --split-batches\n" + LOOP.format(line, body)).text
            assert (OWN in shown) is (right == "False\n"), (what, line, shown)
            assert nb(f"print({same})").stdout == right, (what, line)
    nb("%distributed stop")


@pytest.mark.sample(first=1)
@pytest.mark.kernel
@pytest.mark.parametrize("strategy", ["ddp2", "dp"])
def test_fast_weights_under(strategy: str, shared_kernel: Kernel) -> None:
    nb = Notebook(shared_kernel)
    nb("import copy; first = net(); loader = DataLoader(data, batch_size=16)")
    anew = "model = copy.deepcopy(first); opt = torch.optim.SGD(model.parameters(), 0.1)\n"
    cell = LOOP.replace("{}", "{line}", 1).replace("{}", WITH_THE_LINE["fast weights"])
    if strategy == "ddp2":
        cell = cell.replace("create_graph=True", "create_graph=False")
    nb(anew + cell.replace("{line}", "g") + "wanted = model")
    for line in ("g", "reduce(g)"):
        nb(anew)
        given = f"%%distributed -d 2 -s {strategy} --split-batches\n# {strategy}\n"
        shown = nb(given + cell.replace("{line}", line)).text
        assert (OWN in shown) is (line == "g" and strategy != "dp"), shown
    same = "all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), wanted.parameters()))"
    assert nb(f"print({same})").stdout == "True\n"
    nb("%distributed stop")
