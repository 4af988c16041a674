# %%
"""A spiral learned with an autograd function, a layer and a loss module of the notebook's own."""

import math
from functools import partial

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(8)

# %%
radius = torch.rand(384, 1)
which = torch.arange(384).remainder(2)
angle = radius * 4 + math.pi * which.unsqueeze(1)
points = torch.cat([radius * angle.cos(), radius * angle.sin()], 1) + 0.02 * torch.randn(384, 2)
loader = DataLoader(
    TensorDataset(points, which), batch_size=48, shuffle=True, generator=torch.Generator().manual_seed(9)
)


# %%
class ClippedSquare(torch.autograd.Function):
    """x² whose gradient is cut off at ±2."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (2 * x).clamp(-LIMIT, LIMIT)


LIMIT = 2.0
clipped_square = ClippedSquare.apply


class RadialLayer(nn.Module):
    def __init__(self, inputs, units):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(units, inputs))
        self.log_width = nn.Parameter(torch.zeros(units))
        self.register_buffer("used", torch.zeros(units))

    def forward(self, x):
        distance = clipped_square(x.unsqueeze(1) - self.centres).sum(-1)
        return torch.exp(-distance * self.log_width.exp())


class FocalLoss(nn.Module):
    def __init__(self, gamma=1.5):
        super().__init__()
        self.gamma = gamma
        self.balance = nn.Parameter(torch.zeros(2))

    def forward(self, logits, target):
        logp = (logits + self.balance).log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
        return (-((1 - logp.exp()) ** self.gamma) * logp).mean()


layer_of_16 = partial(RadialLayer, units=16)
model = nn.Sequential(layer_of_16(2), nn.Linear(16, 2))
criterion = FocalLoss()
optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=0.03)
temperature = nn.Parameter(torch.tensor(1.0))
optimizer.add_param_group({"params": [temperature], "lr": 0.01})

# a hook sees what the first layer makes of every batch
means = []
handle = model[0].register_forward_hook(lambda layer, args, out: means.append(out.mean().item()))

# %% distributed
for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x) / temperature, y)
        loss.backward()
        optimizer.step()

# %%
handle.remove()
LIMIT = 1.0
first_means = len(means)

# %% distributed
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        penalty = sum(clipped_square(p).sum() for p in model[1].parameters())
        loss = criterion(model(x) / temperature, y) + 1e-4 * penalty
        loss.backward()
        optimizer.step()

# %%
with torch.no_grad():
    probabilities = model(points).softmax(1)
accuracy = (probabilities.argmax(1) == which).float().mean().item()
check = torch.autograd.gradcheck(ClippedSquare.apply, torch.rand(3, dtype=torch.float64, requires_grad=True) * 0.4)
assert isinstance(model[0], RadialLayer)
assert len(means) == first_means == 40
