"""What is written to disk and read back."""

from tests.lines import Line

TRAIN = """
for x, y in loader:
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
"""

LINES = [
    Line(
        "torch.save on every rank, and back",
        TRAIN
        + """
torch.save(model.state_dict(), "all.pt")
model.load_state_dict(torch.load("all.pt"))
"""
        + TRAIN
        + """
torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "rank": rank}, "checkpoint.pt")
""",
        after="""
found = torch.load("checkpoint.pt")
result["file"] = found["model"]
result["state"] = found["opt"]
assert found["rank"] == 0 and not [f for f in os.listdir() if "tmp" in f or "part" in f], os.listdir()
assert all(torch.equal(a, b) for a, b in zip(found["model"].values(), model.state_dict().values()))
os.remove("checkpoint.pt"); os.remove("all.pt")
""",
    ),
    Line(
        "torch.save on rank 0",
        TRAIN
        + """
if rank == 0:
    torch.save(model.state_dict(), "zero.pt")
barrier()
state = torch.load("zero.pt", map_location="cpu")
model.load_state_dict(state)
del state
"""
        + TRAIN,
        after="result['file'] = torch.load('zero.pt'); os.remove('zero.pt')",
    ),
    Line(
        "a file of each rank's own",
        "torch.save(torch.tensor(rank), f'part{rank}.pt')",
        alone="torch.save(torch.tensor(0), 'part0.pt'); torch.save(torch.tensor(1), 'part1.pt')",
        after="""
result["parts"] = [torch.load(f"part{r}.pt").item() for r in (0, 1)]
os.remove("part0.pt"); os.remove("part1.pt")
""",
    ),
    Line(
        "a file that rank 1 alone writes, many times, while the others train on",
        """
for i, (x, y) in enumerate(loader):
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    if rank == world_size - 1:
        torch.save({"i": i, "rank": rank}, "alone.pt")
""",
        after="""
result["i"] = torch.load("alone.pt")["i"]
os.remove("alone.pt")
""",
    ),
    Line(
        "the best so far, by a rank's own loss",
        """
best = float("inf")
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    if reduce(loss.item()) < best:
        best = reduce(loss.item())
        torch.save(model.state_dict(), "best.pt")
""",
        after="result['best'] = torch.load('best.pt'); os.remove('best.pt')",
    ),
]
