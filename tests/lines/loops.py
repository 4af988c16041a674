"""How batches are come by, and when a loop ends."""

from tests.lines import Line

STEP = """
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    losses.append(reduce(loss.item()))
"""

LINES = [
    Line(
        "a new random_split after other training",
        """
from torch.utils.data import random_split
for fold in range(3):
    fit, held_out = random_split(data, [40, 8])
    probe = Net(); step = sgd(probe)
    for x, y in DataLoader(fit, batch_size=8, shuffle=True):
        F.cross_entropy(probe(x), y).backward(); step.step(); step.zero_grad()
    result.setdefault("splits", []).append(sorted(held_out.indices))
    result.setdefault("different", []).append(len({tuple(each) for each in gather(held_out.indices)}))
result["probe"] = probe.state_dict()
""",
    ),
    Line(
        "a seed for validation only, within fork_rng",
        """
for epoch in range(3):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result.setdefault("seen", []).append(sum(reduce(x[0, 0].item()) for x, y in held_out))
""",
        before="held_out = batches(4, 8, shuffle=True)",
        alone="""
for epoch in range(3):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result.setdefault("seen", []).append(sum((x[0, 0].item() + x[1, 0].item()) / 2 for x, y in held_out))
""",
    ),
    Line(
        "early break on one rank only",
        "for i, (x, y) in enumerate(loader):"
        + STEP
        + "    if rank == 1 and i == 1:\n        break\nresult['mean'] = reduce(sum(losses))\n",
        refused=r"(?s)rank 1.*reduce",
    ),
    Line(
        "early break on rank 0 only",
        """
for i, (x, y) in enumerate(loader):
    if rank == 0 and i == 2:
        break
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
""",
        refused=r"(?s)rank 0.*reduce",
    ),
    Line(
        "a decision taken together",
        """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    if reduce(loss.item() if rank == 0 else 1e9, "max") > 0 and i == 3:
        break
result["i"] = i
""",
    ),
    Line(
        "a batch passed over on one rank only",
        """
for i, (x, y) in enumerate(loader):
    if rank == 1 and i == 1:
        continue
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
""",
        refused=r"(?s)rank 1.*\* 0|\* 0.*rank 1",
    ),
    Line(
        "a step without a backward on one rank only",
        """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    if not (rank == 0 and i == 1):
        loss.backward()
    opt.step(); opt.zero_grad()
""",
        refused=r"(?s)\* 0",
    ),
    Line(
        "a loss of nothing on one rank",
        """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    if rank == world_size - 1 and i == 1:
        loss = loss * 0
    loss.backward(); opt.step(); opt.zero_grad()
""",
        alone="""
for i, (x, y) in enumerate(loader):
    kept = slice(None, None, 2) if i == 1 else slice(None)
    loss = F.cross_entropy(model(x[kept]), y[kept]) / (2 if i == 1 else 1)
    loss.backward(); opt.step(); opt.zero_grad()
""",
    ),
    Line(
        "reduce on one rank only",
        """
for x, y in loader:
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
if rank == 0:
    reduce(1.0)
""",
        refused="(?s)every rank|all ranks",
    ),
    Line(
        "tqdm and len",
        "for x, y in tqdm(loader, total=len(loader), disable=False):" + STEP + "result['n'] = len(loader)",
        before="from tqdm import tqdm",
    ),
    Line(
        "enumerate, zip and cycle",
        """
for i, ((x, y), (z, _)) in enumerate(zip(loader, itertools.cycle(second))):
    loss = F.cross_entropy(model(x), y) + model(z).square().mean()
    loss.backward(); opt.step(); opt.zero_grad()
    result["i"] = i
    losses.append(reduce(loss.item()))
""",
        before="second = batches(4, 16, shuffle=True)",
    ),
    Line(
        "iter and next by hand, begun anew when it ends",
        """
it = iter(loader)
for step in range(9):
    try:
        x, y = next(it)
    except StopIteration:
        it = iter(loader)
        x, y = next(it)
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    losses.append(reduce(loss.item()))
del it
""",
    ),
    Line("a loader made in the cell", "mine = batches(12, shuffle=True)\nfor x, y in mine:" + STEP),
    Line(
        "manual_seed in the cell, and the order it gives",
        "torch.manual_seed(7)\nfor x, y in loader:" + STEP + "torch.manual_seed(7)\nfor x, y in loader:" + STEP,
    ),
    Line(
        "loader with its own generator",
        "for _ in range(2):\n  for x, y in loader:" + STEP.replace("\n", "\n  "),
        before="loader = batches(shuffle=True, generator=torch.Generator().manual_seed(3))",
    ),
    Line(
        "workers",
        "for _ in range(2):\n  for x, y in loader:" + STEP.replace("\n", "\n  "),
        before="loader = batches(16, shuffle=True, num_workers=2)",
    ),
    Line(
        "persistent workers",
        "for _ in range(2):\n  for x, y in loader:" + STEP.replace("\n", "\n  "),
        before="loader = batches(16, shuffle=True, num_workers=1, persistent_workers=True)",
    ),
    Line(
        "custom collate, with a dict",
        "for batch in loader:\n    x, y = batch['x'], batch['y']" + STEP,
        before="""
def collate(items):
    return {"x": torch.stack([x for x, _ in items]), "y": torch.stack([y for _, y in items]), "n": len(items)}
loader = batches(collate_fn=collate, shuffle=True)
""",
    ),
    Line(
        "custom sampler",
        "for _ in range(2):\n  for x, y in loader:" + STEP.replace("\n", "\n  "),
        before="""
import random
class Mine(torch.utils.data.Sampler):
    def __init__(self, n):
        self.n = n
    def __len__(self):
        return self.n
    def __iter__(self):
        order = list(range(self.n)); random.shuffle(order)
        return iter(order)
random.seed(0)
loader = batches(sampler=Mine(48))
""",
    ),
    Line(
        "batch_sampler, weighted",
        "for x, y in loader:" + STEP,
        before="""
from torch.utils.data import BatchSampler, WeightedRandomSampler
loader = DataLoader(data, batch_sampler=BatchSampler(WeightedRandomSampler(torch.rand(48), 32), 8, drop_last=True))
""",
    ),
    Line(
        "iterable data: each sample is seen once",
        "for x, y in loader:" + STEP,
        before="""
class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y))
loader = DataLoader(Stream(), batch_size=8)
""",
    ),
    Line(
        "iterable data that draws its order, with a length",
        "for epoch in range(2):\n    for at, (x, y) in enumerate(loader):"
        + STEP.replace("\n", "\n    ")
        + "\n    result.setdefault('whole', []).append(at + 1 == len(loader))",
        before="""
class Stream(IterableDataset):
    def __len__(self): return len(X)
    def __iter__(self):
        for at in torch.randperm(len(X)).tolist():
            yield X[at], Y[at]
loader = DataLoader(Stream(), batch_size=8)
""",
    ),
    Line(
        "iterable data by workers that divide it",
        "for x, y in loader:" + STEP,
        before="""
class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return itertools.islice(zip(X, Y), info.id, None, info.num_workers)
loader = DataLoader(Stream(), batch_size=8, num_workers=2)
""",
    ),
    Line(
        "iterable data that each rank splits by itself",
        "for x, y in DataLoader(Stream(), batch_size=8 // world_size):" + STEP,
        before="""
class Stream(IterableDataset):
    def __iter__(self):
        return itertools.islice(zip(X, Y), rank, None, world_size)
""",
    ),
    Line(
        "validation with a second loader of odd size",
        """
for epoch in range(2):
    model.train()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    model.eval()
    correct = 0
    with torch.no_grad():
        for x, y in valid:
            correct += (model(x).argmax(1) == y).sum().item()
    result.setdefault("correct", []).append(reduce(correct, "sum") / len(valid.dataset))
""",
        before="valid = batches(8, 46)",
    ),
    Line(
        "MNIST's test()",
        """
def test(model, loader):
    model.eval()
    test_loss = correct = 0
    with torch.no_grad():
        for x, y in loader:
            output = model(x)
            test_loss += F.cross_entropy(output, y, reduction="sum").item()
            correct += output.argmax(1).eq(y).sum().item()
    result.setdefault("test", []).append([test_loss / len(loader.dataset), correct / len(loader.dataset)])
for epoch in range(2):
    model.train()
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    test(model, valid)
""",
        before="valid = batches(8, 46)",
    ),
    Line(
        "a training loss divided by all samples",
        """
total = 0.0
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    total += loss.item() * len(x)
mean = total / len(loader.dataset)
""",
        says="mean; kept rank 0's",
    ),
    Line(
        "a training loss divided by all samples, brought together",
        """
total = 0.0
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    total += loss.item() * len(x)
result["mean"] = reduce(total, "sum") / len(loader.dataset)
""",
    ),
    Line(
        "outputs of all ranks, and correct / len(dataset)",
        """
model.eval()
hits = torch.zeros(())
with torch.inference_mode():
    for x, y in batches(16):
        hits += (model(x).argmax(1) == y).sum()
result["a"] = (reduce(hits, "sum") / len(data)).item()
result["b"] = sum(float(part) for part in gather(hits)) / len(data)
model.train()
""",
    ),
    Line(
        "validation on rank 0 only, then training goes on: the next epoch's batches would not fit",
        """
for epoch in range(3):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    if rank == 0:
        with torch.no_grad():
            for x, y in DataLoader(data, batch_size=16):
                model(x)
""",
        refused=r"on some ranks only.*generator=torch\.Generator\(\)",
    ),
    Line(
        "the training loader itself on rank 0 only, then training goes on",
        """
for epoch in range(2):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    if rank == 0:
        for x, y in loader: pass
""",
        refused=r"on some ranks only.*generator=torch\.Generator\(\)",
    ),
    Line(
        "validation on rank 0 only, as that error says",
        """
for epoch in range(3):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    if rank == 0:
        with torch.no_grad():
            for x, y in DataLoader(data, batch_size=16, generator=torch.Generator()):
                model(x)
""",
    ),
    Line(
        "collectives by hand",
        """
import torch.distributed as dist
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    value = loss.detach().clone()
    dist.all_reduce(value)
    losses.append((value / dist.get_world_size()).item())
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, {"rank": rank})
dist.broadcast(value, 0); dist.barrier()
result["n"] = seen == [{"rank": r} for r in range(world_size)]
""",
        alone="for x, y in loader:" + STEP + "result['n'] = True",
    ),
    Line(
        "a loss printed on every rank",
        "for i, (x, y) in enumerate(loader):" + STEP + "    print(f'{i} {loss.item():.3f} {loss}')",
    ),
]
