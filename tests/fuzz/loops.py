"""The forms of a training loop, and optimizers. `[step]` is a place where edits may stand; `<step>` stands for the lines
that PARTS has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import indent


@dataclass(frozen=True, slots=True)
class Loop:
    text: str
    weight: int = 2
    """how often it is drawn"""
    first: str = ""
    """what it needs in the notebook"""
    brings_optimizer: bool = False
    smooth: bool = False

    def __post_init__(self) -> None:
        text = re.sub("^( *)<(.+)>$", lambda at: indent(PARTS[at[2]], at[1]), self.text, flags=re.MULTILINE)
        object.__setattr__(self, "text", text)


PARTS = {
    "each batch": "for epoch in range({epochs}):\n    [epoch]\n    for i, (x, y) in enumerate(loader):",
    "loss": "out = model(x)\nloss = F.cross_entropy(out, y)\n[loss]",
    "backward": "loss.backward()\n[grad]",
    "step": "opt.step()\n[step]\nopt.zero_grad()\n[zero]",
}
LOOPS: dict[str, Loop] = {
    "plain": Loop("""
<each batch>
        x.requires_grad_(x.is_floating_point())
        [batch]
        <loss>
        <backward>
        <step>
    [end]
""", 12),
    "zero_grad first": Loop("""
<each batch>
        opt.zero_grad()
        [zero]
        x.requires_grad_(x.is_floating_point())
        <loss>
        <backward>
        opt.step()
        [step]
    [end]
""", 4),
    "accumulation": Loop("""
<each batch>
        x.requires_grad_(x.is_floating_point())
        [batch]
        <loss>
        (loss / 2).backward()
        if i % 2:
            [grad]
            <step>
    [end]
""", 5),
    "accumulation, edits in between": Loop("""
for epoch in range({epochs}):
    for i, (x, y) in enumerate(loader):
        x.requires_grad_(x.is_floating_point())
        <loss>
        (loss / 2).backward()
        [grad]
        if i % 2:
            opt.step()
            opt.zero_grad()
        [zero]
    [end]
"""),
    "a function of the notebook": Loop("""
<each batch>
        [batch]
        loss = train_step(x, y)
        [step]
        opt.zero_grad()
        [zero]
    [end]
""",
        first="def train_step(x, y):\n    loss = F.cross_entropy(model(x), y)\n    loss.backward()\n    [grad]\n    opt.step()\n    return loss",
    ),
    "closure": Loop("""
<each batch>
        x.requires_grad_(x.is_floating_point())
        [batch]
        def closure():
            opt.zero_grad()
            <loss>
            <backward>
            return loss
        loss = opt.step(closure)
        [step]
    [end]
"""),
    "two backwards": Loop("""
<each batch>
        [batch]
        F.cross_entropy(model(x), y).backward()
        out = model(x)
        loss = 0.1 * out.square().mean()
        [loss]
        <backward>
        <step>
    [end]
"""),
    "one forward, two backwards": Loop("""
for epoch in range({epochs}):
    for i, (x, y) in enumerate(loader):
        out = model(x)
        (0.1 * out.square().mean()).backward(retain_graph=True)
        loss = F.cross_entropy(out, y)
        [loss]
        <backward>
        <step>
    [end]
""", 1),
    "two optimizers": Loop("""
<each batch>
        x.requires_grad_(x.is_floating_point())
        <loss>
        <backward>
        opt.step()
        [step]
        opt2.step()
        opt.zero_grad(); opt2.zero_grad()
        [zero]
    [end]
""",
        first="opt = torch.optim.Adam([*model.parameters()][::2], lr=0.01, eps=1e-4)\n"
        "opt2 = torch.optim.SGD([*model.parameters()][1::2], lr=0.05, momentum=0.9)",
        brings_optimizer=True,
    ),
    "no optimizer": Loop("""
<each batch>
        <loss>
        <backward>
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None: p -= 0.05 * p.grad
        [step]
        model.zero_grad()
        [zero]
    [end]
""", first="opt = torch.optim.SGD(model.parameters(), lr=0.05)", brings_optimizer=True),
    "gradients by autograd.grad": Loop("""
<each batch>
        learning = [p for p in model.parameters() if p.requires_grad]
        <loss>
        grads = torch.autograd.grad(loss, learning, allow_unused=True)
        for p, g in zip(learning, grads): p.grad = g
        [grad]
        <step>
    [end]
""", 1),
    "gradient penalty on weights": Loop("""
for epoch in range({epochs}):
    for i, (x, y) in enumerate(loader):
        out = model(x)
        loss = F.cross_entropy(out, y)
        grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], create_graph=True, allow_unused=True)
        loss = loss + 0 * sum(g.square().sum() for g in grads if g is not None)
        [loss]
        <backward>
        <step>
    [end]
""", 1, smooth=True),
    "sharpness-aware": Loop("""
for epoch in range({epochs}):
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            steps = [None if p.grad is None else 0.05 * p.grad for p in model.parameters()]
            for p, e in zip(model.parameters(), steps):
                if e is not None: p.add_(e)
        opt.zero_grad()
        [zero]
        <loss>
        loss.backward()
        with torch.no_grad():
            for p, e in zip(model.parameters(), steps):
                if e is not None: p.sub_(e)
        [grad]
        opt.step()
        opt.zero_grad()
        [step]
    [end]
""", 1),
    "all data at once": Loop("""
for epoch in range({epochs}):
    [epoch]
    for i in range(3):
        x, y = X, Y
        [batch]
        <loss>
        opt.zero_grad()
        <backward>
        opt.step()
        [step]
    [end]
""", 1),
    "two models": Loop("""
<each batch>
        [batch]
        out = model(x)
        loss = F.cross_entropy(judge(out), y)
        [loss]
        opt.zero_grad(); opt2.zero_grad()
        <backward>
        opt.step(); opt2.step()
        [step]
        opt2.zero_grad()
        F.cross_entropy(judge(model(x).detach()), y).backward()
        opt2.step()
        [zero]
    [end]
""", first="judge = nn.Linear(3, 3).to(model(X[:2]).dtype)\nopt2 = torch.optim.SGD(judge.parameters(), lr=0.05)"),
    "LBFGS": Loop("""
<each batch>
        def closure():
            opt.zero_grad()
            <loss>
            loss.backward()
            return loss
        loss = opt.step(closure)
        [step]
    [end]
""",
        1,
        first="opt = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad], lr=0.1, max_iter=3)",
        brings_optimizer=True,
    ),
    "optimizer made in the cell": Loop("""
opt = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
<each batch>
        [batch]
        <loss>
        <backward>
        <step>
    [end]
""", first="opt = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)", brings_optimizer=True),
    "next by hand": Loop("""
batches, epoch = iter(loader), 0
for i in range(6):
    try:
        x, y = next(batches)
    except StopIteration:
        batches = iter(loader)
        x, y = next(batches)
    [batch]
    <loss>
    <backward>
    <step>
""", 1),
}  # fmt: skip
# ruff: noqa: E501 — a line of a cell is one line

OPTIMIZERS: dict[str, str] = {
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.05)",
    "SGD with momentum": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)",
    "Adam": "torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)",
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-4)",
    "SGD, nesterov and decay": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.01)",
    "SGD of named parameters": "torch.optim.SGD(model.named_parameters(), lr=0.05, momentum=0.5)",
    "SGD of what learns": "torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.05, momentum=0.5)",
    "Adam, amsgrad": "torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4, amsgrad=True)",
    "Adam, foreach": "torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4, foreach=True)",
    "RMSprop": "torch.optim.RMSprop(model.parameters(), lr=0.005, eps=1e-4)",
    "RMSprop, centered with momentum": "torch.optim.RMSprop(model.parameters(), lr=0.005, eps=1e-3, momentum=0.5, centered=True)",
    "Adagrad": "torch.optim.Adagrad(model.parameters(), lr=0.02, eps=1e-4)",
    "NAdam": "torch.optim.NAdam(model.parameters(), lr=0.01, eps=1e-4)",
    "Adamax": "torch.optim.Adamax(model.parameters(), lr=0.01, eps=1e-4)",
    "two groups": "torch.optim.AdamW([{'params': [p for p in model.parameters() if p.dim() > 1], 'lr': 0.02, 'weight_decay': 0.1}, {'params': [p for p in model.parameters() if p.dim() <= 1]}], lr=0.005, eps=1e-4)",
    "groups with keys of one's own": "torch.optim.SGD([{'params': [p], 'name': n, 'factor': 0.5} for n, p in model.named_parameters()], lr=0.05, momentum=0.5)",
}  # fmt: skip
"""In the order in which shrinking goes towards them: the first is the simplest."""
