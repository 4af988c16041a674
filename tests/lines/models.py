"""Where models and optimizers come from, and what else is done with them."""

from tests.lines import Line

LOOP = """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    losses.append(reduce(loss.item()))
"""

LINES = [
    *(
        Line(
            f"torch.compile before the cell, {backend or 'as it comes'}",
            """
for x, y in loader:
    loss = F.cross_entropy(fast(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    losses.append(reduce(loss.item()))
""",
            before=f"fast = torch.compile(model{backend and f', backend={backend!r}'})",
        )
        for backend in ("eager", "aot_eager")
    ),
    Line(
        "torch.compile in the cell",
        """
model = torch.compile(model, backend="aot_eager")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
result["keys"] = len(model.state_dict())
""",
    ),
    Line("model.compile()", "model.compile(backend='eager')" + LOOP),
    Line(
        "EMA by deepcopy",
        """
ema = copy.deepcopy(model)
for x, y in loader:
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    with torch.no_grad():
        for slow, p in zip(ema.parameters(), model.parameters()):
            slow.mul_(0.9).add_(p, alpha=0.1)
        for slow, p in zip(shadow.parameters(), model.parameters()):
            slow.lerp_(p, 0.5)
result["ema"] = ema.state_dict()
result["outputs"] = ema(X[:3]).detach()
""",
        before="shadow = copy.deepcopy(model).requires_grad_(False)",
        after="result['shadow'] = shadow.state_dict()",
    ),
    Line(
        "AveragedModel and update_bn",
        """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
for x, y in loader:
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    average.update_parameters(model); before.update_parameters(model)
torch.optim.swa_utils.update_bn(loader, before)
result["average"] = average.state_dict()
""",
        before="""
from torch.optim.swa_utils import AveragedModel
before = AveragedModel(model)
""",
        after="result['before'] = before.state_dict()",
    ),
    Line(
        "update_bn counts the batches of all ranks",
        """
from torch.optim.swa_utils import AveragedModel, update_bn
average = AveragedModel(net)
update_bn(loader, average); update_bn(loader, net)
result["means"] = [net[1].running_mean, net[1].running_var, average.module[1].running_mean]
result["apart"] = max(abs(m - average.module[1].running_mean.sum().item()) for m in gather(
    average.module[1].running_mean.sum().item()))
""",
        before="torch.manual_seed(2); net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))",
        flags="",
    ),
    Line(
        "GAN",
        """
for x, y in loader:
    real, noise = x, x.flip(1)
    fake = maker(noise)
    judge.zero_grad()
    loss = (model(real)[:, 0] - 1).square().mean() + model(fake.detach())[:, 0].square().mean()
    loss.backward(); judge.step()
    make.zero_grad()
    (model(fake)[:, 0] - 1).square().mean().backward()
    make.step()
""",
        before="""
torch.manual_seed(2)
maker = nn.Linear(6, 6)
make, judge = torch.optim.Adam(maker.parameters(), 0.01), torch.optim.Adam(model.parameters(), 0.02, betas=(0.5, 0.9))
""",
        after="result['maker'] = maker.state_dict(); result['judge'] = judge.state_dict()",
    ),
    Line(
        "one optimizer for two models and a loose parameter",
        """
for x, y in loader:
    (F.cross_entropy(model(x + other(x)) * scale, y)).backward()
    opt.step(); opt.zero_grad()
""",
        before="""
torch.manual_seed(2)
other, scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))
opt = torch.optim.SGD([*model.parameters(), *other.parameters(), scale], 0.05, momentum=0.9)
""",
        after="result['other'] = other.state_dict(); result['scale'] = scale.detach()",
    ),
    Line(
        "LBFGS with a closure that returns its own rank's loss",
        """
for x, y in loader:
    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x.double()), y)
        loss.backward()
        return loss
    losses.append(opt.step(closure).item())
""",
        before="opt = torch.optim.LBFGS(model.double().parameters(), 0.5, max_iter=4, line_search_fn='strong_wolfe')",
    ),
    Line(
        "a closure for SGD",
        """
for x, y in loader:
    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    losses.append(reduce(opt.step(closure).item()))
""",
    ),
    Line(
        "add_param_group in the cell",
        """
torch.manual_seed(3)
head = nn.Linear(2, 2)
head, = [setup(head)]
opt.add_param_group({"params": head.parameters(), "lr": 0.05})
setup(head, opt)
for x, y in loader:
    F.cross_entropy(head(model(x)), y).backward(); opt.step(); opt.zero_grad()
result["head"] = head.state_dict()
""",
    ),
    Line(
        "add_param_group in the cell, of a model that was captured",
        """
opt.add_param_group({"params": extra.parameters(), "lr": 0.01})
for x, y in loader:
    F.cross_entropy(extra(model(x)), y).backward(); opt.step(); opt.zero_grad()
result["extra"] = extra.state_dict()
""",
        before="torch.manual_seed(3); extra = nn.Linear(2, 2)",
    ),
    Line(
        "add_param_group of a layer made in the cell, without setup",
        """
torch.manual_seed(3)
head = nn.Linear(2, 2)
opt.add_param_group({"params": head.parameters(), "lr": 0.05})
for x, y in loader:
    F.cross_entropy(head(model(x)), y).backward(); opt.step(); opt.zero_grad()
result["head"] = head.state_dict()
""",
    ),
    Line(
        "an optimizer made in the cell for a model from outside",
        "opt = torch.optim.AdamW(model.parameters(), 0.01)" + LOOP,
    ),
    Line(
        "a model and optimizer made in the cell, with setup",
        "torch.manual_seed(5)\nmodel = Net(); opt = sgd(model)\nmodel, opt = setup(model, opt)" + LOOP,
    ),
    Line("a model and optimizer made in the cell, without setup", "model = Net(); opt = sgd(model)" + LOOP),
    Line(
        "models made and copied in a loop, each trained by a function",
        """
def train(model):
    opt = sgd(model)
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    return model
first = train(Net()); second = train(copy.deepcopy(first))
result["both"] = first.state_dict(), second.state_dict()
""",
    ),
    Line(
        "averages of models that are made one after another",
        """
for fold in range(2):
    probe = Net(); average = copy.deepcopy(probe)
    mine = copy.deepcopy(probe) if rank == 0 and not fold else None
    step = sgd(probe)
    for x, y in loader:
        F.cross_entropy(probe(x), y).backward(); step.step(); step.zero_grad()
        with torch.no_grad():
            for slow, p in zip(average.parameters(), probe.parameters()):
                slow.lerp_(p, 0.1)
    numbers_of = gather(sum(p.double().sum().item() for p in average.parameters()))
    result.setdefault("apart", []).append(max(numbers_of) - min(numbers_of))
    result.setdefault("average", []).append(average.state_dict())
del mine
""",
    ),
    Line(
        "lazy layers, which get their shape in the cell",
        """
torch.manual_seed(6)
for lazy in (before, nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(2))):
    lazy.eval()(X[:2])
    step = sgd(lazy)
    for x, y in loader:
        F.cross_entropy(lazy(x), y).backward(); step.step(); step.zero_grad()
    result.setdefault("lazy", []).append(lazy.state_dict())
""",
        before="before = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))",
    ),
    Line(
        "models made one after another, and none of them held for longer",
        """
import weakref
made = []
for fold in range(4):
    probe = Net(); step = sgd(probe); made.append(weakref.ref(probe))
    for x, y in loader:
        F.cross_entropy(probe(x), y).backward(); step.step(); step.zero_grad()
result["alive"] = sum(one() is not None for one in made)
del made
""",
    ),
    Line(
        "models made one after another, and a thread of one rank holds the first for a moment longer",
        """
import threading, time
for fold in range(2):
    probe = Net(); step = sgd(probe)
    for x, y in loader:
        F.cross_entropy(probe(x), y).backward(); step.step(); step.zero_grad()
    if rank and not fold: threading.Thread(target=lambda held: time.sleep(0.2), args=(probe,)).start()
result["last"] = probe.state_dict(); time.sleep(0.3)
""",
    ),
    Line(
        "an optimizer made in the cell, with --accumulate",
        "opt = torch.optim.SGD(model.parameters(), 0.1)" + LOOP,
        flags="--split-batches --accumulate 2",
        alone="""
opt = torch.optim.SGD(model.parameters(), 0.1)
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    (loss / 2).backward()
    if i % 2:
        opt.step(); opt.zero_grad()
    losses.append(loss.item())
""",
    ),
    Line(
        "an optimizer that is given another model's parameters",
        """
for x, y in loader:
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
other = Net()
opt.param_groups[0]["params"] = list(other.parameters())
for x, y in loader:
    F.cross_entropy(other(x), y).backward(); opt.step(); opt.zero_grad()
""",
        refused=r"(?s)NotPrepared.*setup\(",
    ),
    Line(
        "parameters put into an optimizer behind its back",
        """
head = nn.Linear(2, 2)
opt.param_groups[0]["params"] += head.parameters()
for x, y in loader:
    F.cross_entropy(head(model(x)), y).backward(); opt.step(); opt.zero_grad()
""",
        refused=r"(?s)NotPrepared.*setup\(",
    ),
    Line(
        "a model made in the cell after manual_seed, trained by hand without an optimizer",
        """
torch.manual_seed(5)
probe = setup(nn.Linear(6, 2))
for x, y in loader:
    F.cross_entropy(probe(x), y).backward()
    for p in probe.parameters():
        p.data -= 0.1 * p.grad
        p.grad = None
result["probe"] = probe.state_dict()
""",
    ),
    Line(
        "a layer replaced in the cell",
        """
torch.manual_seed(4)
model.last = nn.Linear(12, 2)
opt = sgd(model)
setup(model, opt)
"""
        + LOOP,
    ),
    Line(
        "learning rates by hand, and a scheduler for each batch",
        """
warm = torch.optim.lr_scheduler.LambdaLR(other, lambda step: min(1, (step + 1) / 4))
for i, (x, y) in enumerate(loader):
    opt.param_groups[0]["lr"] = 0.1 / (i + 1)
    F.cross_entropy(model(x), y).backward()
    opt.step(); opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    other.step(); opt.zero_grad(); warm.step(); cosine.step()
    result.setdefault("lr", []).append(cosine.get_last_lr()[0])
result["warm"] = warm.get_last_lr()[0]
""",
        before="""
other = torch.optim.Adam(model.parameters(), 0.02)
cosine = torch.optim.lr_scheduler.OneCycleLR(torch.optim.SGD(fresh(3).parameters(), 0.1), 0.5, total_steps=20)
""",
    ),
    Line(
        "ReduceLROnPlateau on a rank's own value",
        """
for epoch in range(4):
    mean = 0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); opt.step(); opt.zero_grad()
        mean += loss.item() / len(loader)
    plateau.step(mean if rank == 0 else mean + epoch)
    result.setdefault("lr", []).append(opt.param_groups[0]["lr"])
    result.setdefault("best", []).append(plateau.best)
""",
        before="""
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.5)
""",
        alone="""
for epoch in range(4):
    mean = 0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); opt.step(); opt.zero_grad()
        mean += loss.item() / len(loader)
    plateau.step(mean + epoch / 2)
    result.setdefault("lr", []).append(opt.param_groups[0]["lr"])
    result.setdefault("best", []).append(plateau.best)
""",
    ),
    Line(
        "BatchNorm: the ranks agree, also when they evaluate",
        """
for x, y in loader:
    F.cross_entropy(net(x), y).backward(); step.step(); step.zero_grad()
net.eval()
with torch.no_grad():
    out = gather(net(X))
result["apart"] = max((o - out[0]).abs().max().item() for o in out)
net.train()
""",
        before="net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)); step = sgd(net)",
        after="""
seen = net[1].num_batches_tracked.item()
result["means"] = net[1].running_mean[:0]""",
    ),
    Line(
        "SyncBatchNorm: the statistics of the whole batch",
        """
net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
step = sgd(net)
setup(net, step)
for x, y in loader:
    F.cross_entropy(net(x), y).backward(); step.step(); step.zero_grad()
result["net"] = net.state_dict()
""",
        before="torch.manual_seed(2); net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))",
        alone="""
step = sgd(net)
for x, y in loader:
    F.cross_entropy(net(x), y).backward(); step.step(); step.zero_grad()
result["net"] = net.state_dict()
""",
    ),
    Line(
        "model.to(device), x.to(device) with whatever there is",
        """
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = model.to(device)
for x, y in loader:
    x, y = x.to(device, non_blocking=True), y.to(device)
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
del device
""",
    ),
    Line(
        "cuda said outright, on a machine without",
        """
model.to("cuda")
""",
        refused=r"\.to\(device\)",
    ),
    Line(
        "x.cuda(), on a machine without",
        """
for x, y in loader:
    F.cross_entropy(model(x.cuda()), y.to("cuda:0", non_blocking=True)).backward()
""",
        refused=r"\.to\(device\)",
    ),
    *(
        Line(f"the model in {where}", f"m, o = {take}" + LOOP.replace("model(", "m(").replace("opt.", "o."), before=put)
        for where, put, take in (
            ("a dict", "box = {'net': model, 'how': {'opt': opt}}", "box['net'], box['how']['opt']"),
            ("a list", "box = [[model], (opt,)]", "box[0][0], box[1][0]"),
            ("an attribute of self",
             "class Mine:\n    def __init__(self):\n        self.model, self.opt = model, opt\ntrainer = Mine()",
             "trainer.model, trainer.opt"),
            ("a dataclass",
             "@dataclasses.dataclass\nclass State:\n    net: object\n    opt: object\nstate = State(model, opt)",
             "state.net, state.opt"),
            ("a closure", "def holder(m, o):\n    return lambda: (m, o)\nget = holder(model, opt)", "get()"),
            ("a partial", "import functools\nget = functools.partial(lambda m, o: (m, o), model, o=opt)", "get()"),
            ("a class attribute, a bound method",
             "class Box:\n    net, opt = model, opt\n    def get(self):\n        return self.net, self.opt\n"
             "get = Box().get",
             "get()"),
            ("a model within a function within a dict",
             "def outer(m):\n    def inner():\n        return m\n    return {'f': inner}\nbox = outer((model, opt))",
             "box['f']()"),
            ("a default argument", "def get(m=model, *, o=opt):\n    return m, o", "get()"),
            ("a tuple within a tuple", "held = ((1, (model, opt)),)", "held[0][1]"),
            ("a named tuple", "Pair = collections.namedtuple('Pair', 'model opt'); held = Pair(model, opt)",
             "held.model, held.opt"),
            ("a partial of a bound method",
             "import functools\nclass Box:\n    def __init__(self):\n        self.both = model, opt\n"
             "    def get(self, at):\n        return self.both[at:]\nget = functools.partial(Box().get, 0)",
             "get()"),
        )
    ),
    Line(
        "a training function of another cell",
        """
for epoch in range(2):
    result.setdefault("epochs", []).append(train_one_epoch(model, loader))
""",
        before="""
def train_one_epoch(model, loader):
    total = 0.0
    model.train()
    for x, y in loader:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        total += reduce(loss.item())
    return total / len(loader)
""",
    ),
]  # fmt: skip
