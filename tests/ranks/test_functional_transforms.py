"""torch.func, dual numbers and torch.autograd.functional over weights in pieces: what one process gives, or one sentence
that names `with whole(…)`, and in such a block what one process gives."""

# ruff: noqa: E501 — a line of a cell is one line
from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain.machine import registry
from tests.fuzz.common_edits import BEGIN, LINE
from tests.fuzz.player import Player

LINES = {
    "jvp of a call": "jvp(f, (P,), (ones(P),))[1]",
    "jvp of a call, detached": "jvp(f, (D,), (ones(D),))[1]",
    "jvp": "jvp(lambda w: (w @ w.T).sin().sum(), (model[{}].weight,), (torch.ones_like(model[{}].weight),))[1]",
    "jvp of a detached weight": "jvp(lambda w: w.square().sum(), (model[{}].weight.detach(),), (torch.ones(model[{}].weight.shape),))[1]",
    "jvp, a weight for a tangent": "jvp(lambda a: (a ** 3).sum(), (torch.ones(model[{}].weight.shape),), (model[{}].weight,))[1]",
    "jvp, a weight besides": "jvp(lambda a: (a @ model[{}].weight.T).sin().sum(), (Z({}),), (torch.ones_like(Z({})),))[1]",
    "jvp of the model": "jvp(model, (X,), (torch.ones_like(X),))[1].sum()",
    "a dual number": "dual(lambda d: (d * d).sum(), model[{}].weight)",
    "a dual number of a detached weight": "dual(lambda d: F.linear(Z({}), d).sum(), model[{}].weight.detach())",
    "dual numbers of a call": "dual(lambda d: f({{'0.weight': d, '4.bias': model[4].bias}}), model[0].weight)",
    "a dual number, a weight besides": "dual(lambda d: F.linear(d, model[{}].weight).sin().sum(), Z({}))",
    "a dual number for the model": "dual(model, X) if in_block else torch.zeros(())",
    "the same without gradients": "no_grad(lambda: dual(model, X))",
    "grad of a call": "total(grad(f)(P))",
    "grad of a call, detached": "total(grad(f)(D))",
    "grad": "grad(lambda w: w.pow(3).sum())(model[{}].weight).sum()",
    "grad, a weight besides": "grad(lambda a: (F.linear(a, model[{}].weight).sin() * model[{}].bias.detach().norm()).sum())(Z({})).sum()",
    "grad, the sum of a weight besides": "grad(lambda a: a.sum() * model[{}].weight.square().sum() + model[{}].weight.data[0, 0])(Z({})).sum()",
    "grad of the model": "grad(lambda a: model(a).sum())(X).abs().sum()",
    "vjp": "vjp(lambda w: w.sin(), model[{}].weight)[1](torch.ones(model[{}].weight.shape))[0].sum()",
    "vjp of a call": "total(vjp(f, P)[1](torch.tensor(1.0))[0])",
    "jacrev of a call": "total(jacrev(f)(P))",
    "jacrev": "jacrev(lambda w: w.square().sum(0))(model[{}].weight).sum()",
    "jacfwd": "jacfwd(lambda w: w.square().sum(0))(model[{}].weight).sum()",
    "hessian": "hessian(lambda w: w.pow(3).sum())(model[{}].bias).sum()",
    "hessian of a call": "hessian(lambda b: f({{**D, '4.bias': b}}))(model[4].bias).abs().sum()",
    "jacrev of the model": "jacrev(model)(X[0]).sum()",
    "hessian of the model": "hessian(lambda a: model(a).sum())(X[0]).abs().sum()",
    "vmap": "vmap(lambda w: w.square().sum())(model[{}].weight).sum()",
    "vmap of the model": "vmap(model)(X).sum()",
    "vmap, a weight besides": "vmap(lambda a: F.linear(a, model[{}].weight).sum())(Z({})).sum()",
    "vmap, a weight that is not mapped": "vmap(lambda a, w: F.linear(a, w).sum(), (0, None))(Z({}), model[{}].weight).sum()",
    "gradients of samples": "total(vmap(grad(lambda p, a, b: F.cross_entropy(functional_call(model, p, (a[None],)), b[None])), (None, 0, 0))(D, X, Y))",
    "models side by side": "torch.func.stack_module_state([model, model])[0]['0.weight'].sum()",
    "autograd's jacobian": "FA.jacobian(lambda w: F.linear(Z({}), w).sum(0), model[{}].weight).sum()",
    "autograd's jvp": "FA.jvp(lambda w: w.square().sum(), model[{}].weight, torch.ones(model[{}].weight.shape))[1].sum()",
    "autograd's hvp": "FA.hvp(lambda w: w.pow(3).sum(), model[{}].weight, torch.ones(model[{}].weight.shape))[1].sum()",
    "autograd's hessian": "FA.hessian(lambda w: w.pow(3).sum(), model[{}].bias).sum()",
    "autograd's jacobian, forward": "FA.jacobian(lambda w: w.square().sum(0), model[{}].weight.detach(), strategy='forward-mode', vectorize=True).sum()",
    "autograd's jacobian of the model": "FA.jacobian(model, X[0]).sum()",
    "autograd's hessian of the model": "FA.hessian(lambda a: model(a).sum(), X[0]).abs().sum()",
    "a call, by names": "functional_call(module=model, parameter_and_buffer_dicts=[{{'0.weight': P['0.weight'] * 2}}, {{'0.bias': D['0.bias']}}], args=(X,)).sum()",
    "a call with other weights": "functional_call(model, {{k: p.detach() * 0.5 for k, p in P.items()}}, (X,)).sum()",
    "in a loss: jvp": "trained(lambda: 0.1 * jvp(lambda w: w.square().sum(), (model[{}].weight,), (torch.ones(model[{}].weight.shape),))[1])",
    "in a loss: jvp of a call": "trained(lambda: 0.1 * jvp(f, (P,), (ones(P),))[1])",
    "in a loss: grad": "trained(lambda: 0.1 * grad(lambda w: w.pow(3).sum())(model[{}].weight).square().sum())",
    "in a loss: a weight besides": "trained(lambda: 0.1 * grad(lambda a: F.linear(a, model[{}].weight).sin().sum())(Z({})).square().sum())",
    "in a loss: grad of the model": "trained(lambda: 0.1 * grad(lambda a: model(a).sum())(X).square().mean())",
}  # fmt: skip
"""Each for a layer of the first rank's and one of the last's, where it names one."""
NOTEBOOK = (
    BEGIN
    + f"""
import torch.autograd.forward_ad as fwAD, torch.autograd.functional as FA
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from nbtrain import whole
LINES = { {f"{name} {layer}": line.format(*[layer] * 4) for name, line in LINES.items() for layer in ((0, 4) if "{}" in line else (0,))} }
def ones(p): return {{k: torch.ones_like(v) for k, v in p.items()}}
def total(r): return sum(v.double().abs().sum() for v in r.values())
def Z(layer): return X if layer == 0 else X.repeat(1, 2)[:, :8]
def dual(function, primal):
    with fwAD.dual_level():
        out = fwAD.unpack_dual(function(fwAD.make_dual(primal, torch.ones(primal.shape)))).tangent
        return float("nan") if out is None else out.sum().item()
def no_grad(function):
    with torch.no_grad(): return function()
"""
)
CELL = """
def f(p): return F.cross_entropy(functional_call(model, p, (X,)), Y)
def trained(penalty):
    before = [p.detach().clone() for p in model.parameters()]
    try:
        loss = F.cross_entropy(model(X), Y) + penalty()
        loss.backward(); opt.step()
        return sum((p.detach() - q).double().abs().sum().item() for p, q in zip(model.parameters(), before))
    finally:
        opt.zero_grad()
        with torch.no_grad():
            for p, q in zip(model.parameters(), before): p.copy_(q)
def tried(line):
    P = dict(model.named_parameters()); D = {k: p.detach() for k, p in P.items()}
    try: return float(eval(line, {**globals(), "P": P, "D": D}))
    except Exception as error: return f"{type(error).__name__}: {error}"
opt.step(); result["lines"] = {}; used = (X, Y, Z, ones, total, dual, no_grad, fwAD, FA, functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap)
"""
PLAIN = CELL + "in_block = False\nfor name, line in LINES.items(): result['lines'][name] = tried(line)"
BLOCK = (
    CELL
    + "in_block = True\nwith whole(model):\n    for name, line in LINES.items():\n        if 'in a loss' not in name: result['lines'][name] = tried(line)"
)
STRATEGIES = ("zero1", "sharded", "fsdp", "deepspeed_stage_2", "deepspeed_stage_3", "pipeline")


def answers(strategy: str) -> Iterator[dict[str, float | str]]:
    """What each line gives, or the sentence, without a block and in one."""
    with Player(strategy) as player:
        story = player.play([(False, NOTEBOOK), (True, PLAIN), (True, BLOCK)])
    for cell in story[1:]:
        assert cell.error is None, cell.error
        assert not cell.hung
        held = {path: value for path, value in cell.held.items() if path.startswith("result['lines']['")}
        yield {path[17:-2]: value if isinstance(value, str) else value.item() for path, value in held.items()}


@pytest.fixture(scope="module")
def wanted() -> list[dict[str, float | str]]:
    """What one process has."""
    plain, block = answers("")
    assert not [text for text in (*plain.values(), *block.values()) if isinstance(text, str)]
    return [plain, block]


def apart(wanted: dict[str, float | str], found: dict[str, float | str]) -> dict[str, str]:
    """Lines that give other numbers, or raise what names no line to write."""
    pairs = {name: (want, found.get(name, "nothing")) for name, want in wanted.items()}
    return {
        name: f"{got} and not {want}"
        for name, (want, got) in pairs.items()
        if not (got == pytest.approx(want, rel=1e-4, abs=1e-6) if isinstance(got, float) else is_sentence(got))
    }


def is_sentence(text: str) -> bool:
    return text.startswith("NotSupported") and (LINE in text or "--strategy ddp" in text or "the strategy ddp" in text)


@pytest.mark.limit(300)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_they_give_what_they_give_in_one_process(strategy: str, wanted: list[dict[str, float | str]]) -> None:
    if not all(map(find_spec, registry.strategy(strategy.split("_")[0]).needs.packages)):
        pytest.skip(f"{strategy} is not installed")
    plain, block = answers(strategy)
    assert apart(wanted[0], plain) == {}
    assert apart(wanted[1], block) == {}
    assert not [name for name, text in block.items() if isinstance(text, str)]
