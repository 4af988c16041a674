"""The edits of docs/edits.md, in plain words: one small program for each, played under every strategy.

`.ci/edits` plays them all and writes the page; `test_edits.py` plays a sample and compares it with the page.
"""

# ruff: noqa: E501 — a line of a cell is one line
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.fuzz.player import Player
from tests.fuzz.verdicts import Oracle, Verdict, judge

STRATEGIES = {
    "ddp": "ddp", "zero1": "zero1", "sharded": "sharded", "fsdp": "fsdp", "deepspeed 1": "deepspeed_stage_1",
    "deepspeed 2": "deepspeed_stage_2", "deepspeed 3": "deepspeed_stage_3", "pipeline": "pipeline", "dp": "dp",
    "horovod": "horovod",
}  # fmt: skip
"""How the page calls them."""
LINE = "with whole("
"""what a sentence names where complete tensors do it"""
WITH = "whole: "
"""how an entry begins where the sentence's line is right"""

BEGIN = """
import copy, io, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.optim.swa_utils import AveragedModel
torch.manual_seed(0)
X = torch.randn(32, 6)
Y = torch.randint(3, (32,))
loader = DataLoader(TensorDataset(X, Y), batch_size=8)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
opt = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
result = {}
""".strip()

LOOP = """
[before]
for epoch in range(2):
    for i, (x, y) in enumerate(loader):
        out = model(x)
        loss = F.cross_entropy(out, y)
        [loss]
        loss.backward()
        [gradients]
        opt.step()
        [between]
        opt.zero_grad()
    [epoch]
[after]
"""


@dataclass(frozen=True, slots=True)
class CommonEdit:
    words: str
    text: str
    place: str
    """`between` steps, `loss` (before the backward), `gradients` (after it), `before` or `after` the loop, `epoch`"""
    first: str = ""
    """what stands before the loop"""
    notebook: str = ""
    """what the notebook does before the cell"""

    def program(self) -> list[tuple[bool, str]]:
        lines = []
        for line in LOOP.strip().split("\n"):
            place = re.fullmatch(r"( *)\[(\w+)\]", line)
            if not place:
                lines.append(line)
                continue
            texts = [self.first if place[2] == "before" else "", self.text if place[2] == self.place else ""]
            lines += [place[1] + one for text in texts if text for one in text.split("\n")]
        cell = "\n".join(lines)
        return [(False, f"{BEGIN}\n{self.notebook}\npass"), (True, f"{cell}\npass"), (True, f"{cell}\npass")]


ALL = "for p in model.parameters()"
TABLE = (
    CommonEdit("nothing but the loop", "", "between"),
    CommonEdit("weights multiplied in place between steps (`p.mul_`, no_grad)", f"with torch.no_grad():\n    {ALL}: p.mul_(0.99)", "between"),
    CommonEdit("weights multiplied through `.data`", f"{ALL}: p.data.mul_(0.99)", "between"),
    CommonEdit("weights given a new `.data`", f"{ALL}: p.data = p.data * 0.99", "between"),
    CommonEdit("weights clamped", f"{ALL}: p.data.clamp_(-0.3, 0.3)", "between"),
    CommonEdit("a row of a weight written", "model[0].weight.data[0] = 0.25", "between"),
    CommonEdit("a weight scaled to a norm", "with torch.no_grad(): model[0].weight.div_(model[0].weight.norm())", "between"),
    CommonEdit("a pruning mask applied after each step", "model[0].weight.data.mul_(kept)", "between", "kept = (model[0].weight.detach().abs() > 0.1).float()"),
    CommonEdit("a weight drawn anew before the loop (`nn.init`)", "nn.init.normal_(model[0].weight, std=0.3)", "before"),
    CommonEdit("noise added to weights (`torch.randn_like`) before the loop", f"{ALL}: p.data.add_(torch.randn_like(p), alpha=0.01)", "before"),
    CommonEdit("reads the norm of all weights", "result['norm'] = sum(p.detach().norm() ** 2 for p in model.parameters()).sqrt().item()", "between"),
    CommonEdit("reads the largest weight", "result['max'] = max(p.abs().max().item() for p in model.parameters())", "between"),
    CommonEdit("copies all weights (`p.detach().clone()`)", "result['copies'] = {n: p.detach().clone() for n, p in model.named_parameters()}", "epoch"),
    CommonEdit("reads a weight as a list or as numpy", "result['row'] = model[0].weight[0].tolist(); result['numpy'] = float(model[0].weight.detach().numpy().sum())", "between"),
    CommonEdit("L2 penalty by hand in the loss", "loss = loss + 0.01 * sum(p.square().sum() for p in model.parameters())", "loss"),
    CommonEdit("L1 penalty by hand in the loss", "loss = loss + 1e-3 * sum(p.abs().sum() for p in model.parameters())", "loss"),
    CommonEdit("penalty by the distance from the first weights", "loss = loss + 0.1 * sum((p - s).square().sum() for p, s in zip(model.parameters(), start))", "loss", "start = [p.detach().clone() for p in model.parameters()]"),
    CommonEdit("gradient penalty on the input (`create_graph`)", "a = x.clone().requires_grad_()\nslope, = torch.autograd.grad(model(a)[:, 0].sum(), a, create_graph=True)\nloss = loss + 0.1 * slope.square().sum(1).mean()", "loss"),
    CommonEdit("penalty made of `p.grad` (`loss.backward(create_graph=True)`)", f"loss.backward(create_graph=True)\nloss = 0.1 * sum(p.grad.square().sum() {ALL})", "loss"),
    CommonEdit("a second forward and backward before the step", "(0.1 * model(x).square().mean()).backward()", "gradients"),
    CommonEdit("one forward, two backwards (`retain_graph`)", "(0.1 * out.square().mean()).backward(retain_graph=True)", "loss"),
    CommonEdit("accumulation by hand over two batches", "if i % 2 == 0: continue", "gradients"),
    CommonEdit("`clip_grad_norm_`", "result.setdefault('norms', []).append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))", "gradients"),
    CommonEdit("`clip_grad_value_`", "nn.utils.clip_grad_value_(model.parameters(), 0.01)", "gradients"),
    CommonEdit("gradients scaled in place", f"{ALL}: p.grad.mul_(0.5)", "gradients"),
    CommonEdit("gradients replaced (`p.grad = ...`)", f"{ALL}: p.grad = p.grad.clamp(-0.01, 0.01)", "gradients"),
    CommonEdit("the norm of gradients read by hand", "result['norm'] = sum(p.grad.norm() ** 2 for p in model.parameters()).sqrt().item()", "gradients"),
    CommonEdit("a layer frozen and thawed between epochs", "model[0].requires_grad_(epoch == 1)", "epoch"),
    CommonEdit("a new last layer and a new optimizer", "model[4] = nn.Linear(8, 3); opt = torch.optim.SGD(model.parameters(), lr=0.05)", "before"),
    CommonEdit("`add_param_group` of a thawed layer", "if epoch == 0 and len(opt.param_groups) == 1:\n    model[0].requires_grad_(True); opt.add_param_group({'params': [*model[0].parameters()], 'lr': 0.02})", "epoch", notebook="model[0].requires_grad_(False)\nopt = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], lr=0.01, eps=1e-4)"),
    CommonEdit("EMA in a copy of the model, made in the cell", "with torch.no_grad():\n    for a, p in zip(ema.parameters(), model.parameters()): a.lerp_(p, 0.1)", "between", "ema = copy.deepcopy(model)"),
    CommonEdit("EMA in a copy of the model, made in the notebook", "with torch.no_grad():\n    for a, p in zip(ema.parameters(), model.parameters()): a.mul_(0.9).add_(p, alpha=0.1)", "between", notebook="ema = copy.deepcopy(model).requires_grad_(False)"),
    CommonEdit("EMA in a dict of tensors", "for k, p in model.named_parameters(): ema[k].mul_(0.9).add_(p.data, alpha=0.1)", "between", notebook="ema = {k: p.detach().clone() for k, p in model.named_parameters()}"),
    CommonEdit("`AveragedModel`", "avg.update_parameters(model)", "between", notebook="avg = AveragedModel(model)"),
    CommonEdit("the best weights kept and loaded at the end", "model.load_state_dict(best)", "after", "best = copy.deepcopy(model.state_dict())"),
    CommonEdit("the optimizer's state kept and loaded at the end", "opt.load_state_dict(kept)", "after", "kept = copy.deepcopy(opt.state_dict())"),
    CommonEdit("the optimizer's state edited in place", "for s in opt.state.values(): s['exp_avg'].mul_(0.5)", "epoch"),
    CommonEdit("learning rates and keys of groups changed", "for g in opt.param_groups: g['lr'] *= 0.9; g['tag'] = 'mine'", "between"),
    CommonEdit("a scheduler", "sched.step()", "between", notebook="sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.02, total_steps=40)"),
    CommonEdit("a forward hook that changes the output", "", "between", notebook="hook = model[0].register_forward_hook(lambda m, a, o: o * 0.9)"),
    CommonEdit("a hook on a weight's gradient (`register_hook`)", "", "between", notebook="hook = model[0].weight.register_hook(lambda g: g * 0.5)"),
    CommonEdit("a step hook of the optimizer", "", "between", notebook="hook = opt.register_step_post_hook(lambda o, a, k: result.__setitem__('steps', result.get('steps', 0) + 1))"),
    CommonEdit("a full backward hook of a module", "", "between", notebook="hook = model[2].register_full_backward_hook(lambda m, i, o: (i[0] * 0.5,))"),
    CommonEdit("evaluation between epochs", "model.eval()\nwith torch.no_grad(): result['eval'] = model(X).abs().mean().item()\nmodel.train()", "epoch"),
    CommonEdit("a model in double precision", "", "between", notebook="model.double(); X = X.double(); loader = DataLoader(TensorDataset(X, Y), batch_size=8)"),
    CommonEdit("LBFGS", "def closure():\n    lbfgs.zero_grad()\n    out = F.cross_entropy(model(x), y)\n    out.backward()\n    return out\nlbfgs.step(closure)", "between", notebook="lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=2)"),
)  # fmt: skip


WHOLE = "from nbtrain import whole"

IN_PLACE_OF = {
    "`clip_grad_value_`": CommonEdit("", "with whole(model, gradients=True): nn.utils.clip_grad_value_(model.parameters(), 0.01)", "gradients", notebook=WHOLE),
    "gradients scaled in place": CommonEdit("", f"with whole(model, gradients=True):\n    {ALL}: p.grad.mul_(0.5)", "gradients", notebook=WHOLE),
    "gradients replaced (`p.grad = ...`)": CommonEdit("", f"with whole(model, gradients=True):\n    {ALL}: p.grad = p.grad.clamp(-0.01, 0.01)", "gradients", notebook=WHOLE),
    "the norm of gradients read by hand": CommonEdit("", "with whole(model, gradients=True): result['norm'] = sum(p.grad.norm() ** 2 for p in model.parameters()).sqrt().item()", "gradients", notebook=WHOLE),
    "a layer frozen and thawed between epochs": CommonEdit("", "with whole(model): model[0].requires_grad_(epoch == 1)", "epoch", notebook=WHOLE),
    "a new last layer and a new optimizer": CommonEdit("", "with whole(model, opt): model[4] = nn.Linear(8, 3); opt = torch.optim.SGD(model.parameters(), lr=0.05)", "before", notebook=WHOLE),
    "EMA in a copy of the model, made in the cell": CommonEdit("", "with whole(model), torch.no_grad():\n    for a, p in zip(ema.parameters(), model.parameters()): a.lerp_(p, 0.1)", "between", "with whole(model): ema = copy.deepcopy(model)", notebook=WHOLE),
    "the optimizer's state edited in place": CommonEdit("", "with whole(opt):\n    for s in opt.state.values(): s['exp_avg'].mul_(0.5)", "epoch", notebook=WHOLE),
    "a hook on a weight's gradient (`register_hook`)": CommonEdit("", "with whole(model[0], gradients=True): model[0].weight.grad.mul_(0.5)", "gradients", notebook=WHOLE),
}  # fmt: skip
"""For rows that some strategies refuse: the same with complete tensors."""


def played(name: str, edits: tuple[CommonEdit, ...], oracle: Oracle) -> Iterator[tuple[CommonEdit, Verdict, str]]:
    """Each edit under one strategy of the page, and what the page says of it."""
    with Player(STRATEGIES[name]) as ranks:
        for edit in edits:
            cells = edit.program()
            verdict = judge(*oracle.recall(cells), ranks.play(cells))
            text = entry(verdict)
            if verdict.word == "refused" and LINE in text and edit.words in IN_PLACE_OF:
                cells = IN_PLACE_OF[edit.words].program()
                instead = judge(*oracle.recall(cells), ranks.play(cells))
                text = WITH + text if instead.word == "right" else f"**wrong**, and so is {LINE}: {entry(instead)}"
            yield edit, verdict, text


def entry(verdict: Verdict) -> str:
    """What the page says of it: a word, or the sentence."""
    if verdict.word == "right":
        return "right"
    first = verdict.why.split("\n")[0]
    if verdict.word == "refused":
        sentence = first.partition(": ")[2]
        return sentence.replace("|", r"\|").strip()
    if verdict.word == "said":
        return f"**differs**, and says: {first}".replace("|", r"\|").strip()
    raised = re.match(r"a bare error: (\w+)", first)
    return f"**wrong**: raises {raised[1]}, no sentence" if raised else "**wrong**: other numbers, no word"
