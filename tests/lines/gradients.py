"""Between the forward and the step."""

from tests.lines import Line

LINES = [
    Line(
        "an optimizer for each parameter, stepped while the backward goes on",
        """
own = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
def step(p):
    own[p].step(); own[p].zero_grad()
handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
for handle in handles:
    handle.remove()
del handle, handles, own, step
""",
    ),
    Line(
        "clip_grad_norm_",
        """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    result.setdefault("norms", []).append(norm.item())
    opt.step(); opt.zero_grad()
    losses.append(reduce(loss.item()))
""",
    ),
    Line(
        "clip_grad_norm_ imported by name before, clip_grad_value_, get_total_norm",
        """
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    result.setdefault("norms", []).append(float(clip_grad_norm_([*model.parameters()], max_norm=0.2, norm_type=1)))
    nn.utils.clip_grad_value_(model.parameters(), 0.004)
    result["total"] = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    opt.step(); opt.zero_grad()
""",
        before="from torch.nn.utils import clip_grad_norm_",
    ),
    Line(
        "gradients looked at and edited by hand",
        """
for x, y in loader:
    opt.zero_grad(set_to_none=False)
    F.cross_entropy(model(x), y).backward()
    result["largest"] = max(p.grad.abs().max().item() for p in model.parameters())
    for p in model.parameters():
        p.grad.div_(2)
    model.last.bias.grad = model.last.bias.grad.clamp(-0.01, 0.01)
    opt.step()
""",
    ),
    Line(
        "parameters updated by hand",
        """
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    model.zero_grad()
""",
    ),
    Line(
        "parameters updated from autograd.grad by hand, without an optimizer",
        """
for x, y in loader:
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), [*model.parameters()])
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads):
            p -= 0.1 * reduce(g)
""",
    ),
    Line(
        "autocast, own",
        """
for x, y in loader:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    losses.append(reduce(loss.item()))
""",
        tolerance=2e-2,  # bf16 products of other shapes
    ),
    Line(
        "autocast and a GradScaler that skips steps",
        """
for i, (x, y) in enumerate(loader):
    opt.zero_grad()
    with torch.amp.autocast("cpu", enabled=False):
        loss = F.cross_entropy(model(x), y)
    if i == 2 and rank == world_size - 1:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(opt)
    scaler.update()
    result.setdefault("scales", []).append(scaler.get_scale())
""",
        before="scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10, growth_interval=2)",
        after="""
assert result["scales"] == [1024, 2048, 1024, 1024, 2048, 2048], result
assert scaler.get_scale() == 2048""",
    ),
    Line(
        "a GradScaler made in the cell, without unscale_",
        """
scaler = torch.cuda.amp.GradScaler(enabled=False)
other = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    if i == 1 and rank == 0:
        loss = loss * float("nan")
    other.scale(scaler.scale(loss)).backward()
    other.step(opt); other.update(); opt.zero_grad(); scaler.update()
result["scale"] = other.get_scale()
""",
    ),
    Line(
        "several forwards before one backward",
        """
for x, y in loader:
    loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(-x), 1 - y)
    loss.backward(); opt.step(); opt.zero_grad()
""",
    ),
    Line(
        "several forwards, several backwards",
        """
for x, y in loader:
    one, two = F.cross_entropy(model(x), y), F.cross_entropy(model(-x), 1 - y)
    one.backward(); two.backward()
    opt.step(); opt.zero_grad()
""",
    ),
    Line(
        "one forward, two backwards",
        """
for x, y in loader:
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    (out.square().mean() * 0.1).backward()
    opt.step(); opt.zero_grad()
""",
    ),
    Line(
        "accumulation by hand, and what is left over at the end",
        """
opt.zero_grad()
for i, (x, y) in enumerate(loader):
    (F.cross_entropy(model(x), y) / 4).backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        opt.step(); opt.zero_grad()
result["batches"] = len(loader)
""",
    ),
    Line(
        "gradients kept: zero_grad(set_to_none=False)",
        """
for x, y in loader:
    opt.zero_grad(set_to_none=False)
    F.cross_entropy(model(x), y).backward()
    opt.step()
result["grad"] = model.first.weight.grad.clone()
""",
    ),
    Line(
        "a backward thrown away",
        """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if i % 2:
        opt.zero_grad()
        continue
    opt.step(); opt.zero_grad()
""",
    ),
    Line(
        "gradient penalty",
        """
for x, y in loader:
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    slope, = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
    (loss + slope.square().sum(1).mean()).backward()
    opt.step(); opt.zero_grad()
""",
    ),
    Line(
        "frozen, then thawed, with unused parameters",
        """
for epoch in range(2):
    model.first.requires_grad_(epoch == 1)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        opt.step(); opt.zero_grad()
result["unused"] = model.spare.weight.grad is None
""",
        before="""
model.spare = nn.Linear(3, 3)
opt = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.5)
""",
    ),
    Line(
        "detect_anomaly and a hook on a tensor and a parameter",
        """
model.first.weight.register_hook(lambda grad: grad * 0.5)
seen = []
with torch.autograd.set_detect_anomaly(True):
    for x, y in loader:
        h = model.first(x)
        h.register_hook(lambda g: seen.append(1))
        F.cross_entropy(model.last(torch.tanh(h)), y).backward()
        opt.step(); opt.zero_grad()
result["seen"] = len(seen)
model.first.weight._backward_hooks.clear()
""",
    ),
    Line(
        "checkpointed layers",
        """
from torch.utils.checkpoint import checkpoint
for x, y in loader:
    F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
    opt.step(); opt.zero_grad()
    x.requires_grad_()
    F.cross_entropy(checkpoint(model, x, use_reentrant=True), y).backward()
    opt.step(); opt.zero_grad()
""",
    ),
]
