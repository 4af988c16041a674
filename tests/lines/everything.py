"""One model with much of what makes it hard for ranks to have the numbers of one process, and the loops that train it.

AdamW with two groups and a state from before, a schedule, active clipping, accumulation, a tied embedding, a frozen
layer, a method of its own that trains.
"""

ACCURACY = 1e-5

START = """
import copy, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 13), nn.Linear(13, width)
    def forward(self, x):
        return x + self.back(F.gelu(self.wide(self.norm(x))))

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.linspace(-1, 1, 5)[:, None])
    def forward(self, x):
        x = self.frozen(self.embed(x)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)
    def denoise(self, x):
        "A loss of its own, from layers that it calls by itself; and the backward."
        hidden = self.blocks[1](self.embed(x) + 0.1 * self.positions)
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())
        (loss / share).backward()
        return loss.item()

torch.manual_seed(0)
data = TensorDataset(torch.randint(11, (128, 5)), torch.randint(11, (128, 5)))
loader = DataLoader(data, batch_size=8)

def fresh():
    torch.manual_seed(1)
    model = Tagger()
    weights = [p for p in model.parameters() if p.dim() > 1]  # the frozen ones too, as people do
    others = [p for p in model.parameters() if p.dim() == 1 and p.requires_grad]
    opt = torch.optim.AdamW(
        [{"params": weights, "lr": 1e-2, "weight_decay": 0.1}, {"params": others, "betas": (0.8, 0.95)}],
        lr=3e-3, weight_decay=0.0,
    )
    F.cross_entropy(model(data[:8][0]).flatten(0, 1), data[:8][1].flatten()).backward()
    opt.step(); opt.zero_grad()
    return model, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
"""

BY_HAND = """
for i, (x, y) in enumerate(loader):
    if i % 2 == 0:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        (loss / share).backward()
        losses.append(reduce(loss.item()))
    else:
        losses.append(reduce(model.denoise(x)))
    if (i + 1) % share == 0:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        opt.step(); schedule.step(); opt.zero_grad()
"""
"""Eight steps of two batches each. In every step each parameter gets a gradient: DeepSpeed steps those that get none
with zeros, and says so."""

COUNTED = """
for x, y in loader:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    losses.append(reduce(loss.item()))
    nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    opt.step(); schedule.step(); opt.zero_grad()
"""
"""The same for `--accumulate 2`: nothing in the loop says so."""

COUNTED_ALONE = """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    (loss / 2).backward()
    losses.append(loss.item())
    if i % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        opt.step(); schedule.step(); opt.zero_grad()
"""

WAYS = {"by hand": ("", BY_HAND, BY_HAND), "--accumulate": ("--accumulate 2", COUNTED, COUNTED_ALONE)}
"""flags, the cell on the ranks, the same in one process"""

ANEW = """
model, opt, schedule = fresh()
losses, norms, share = [], [], 2
before = [(p, id(opt.state.get(p))) for p in model.parameters()], [id(g) for g in opt.param_groups]
"""

TELL = """numbers({"model": model, "state": opt.state_dict()["state"], "losses": losses,
         "lr": [g["lr"] for g in opt.param_groups], "last": schedule.get_last_lr(), "epoch": schedule.last_epoch})"""

UNTOUCHED = """
assert type(model) is Tagger and model.head.weight is model.embed.weight
assert all(p is q and type(p) is nn.Parameter for p, (q, _) in zip(model.parameters(), before[0]))
assert [id(g) for g in opt.param_groups] == before[1] and schedule.optimizer is opt
assert [id(opt.state.get(p)) for p in model.parameters()] == [state for _, state in before[0]]
assert {p for p in opt.state} <= set(model.parameters())
"""
