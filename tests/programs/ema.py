# %%
"""Diabetes progression by regression, with an exponential moving average of the weights."""

import copy

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(2)
np.random.seed(2)

# %%
features, target = load_diabetes(return_X_y=True)
scaler = StandardScaler()
features = scaler.fit_transform(features).astype(np.float32)
target = ((target - target.mean()) / target.std()).astype(np.float32)
dataset = TensorDataset(torch.from_numpy(features), torch.from_numpy(target))
train_set, test_set = random_split(dataset, [384, len(dataset) - 384])
loader = DataLoader(train_set, batch_size=32, shuffle=True)


# %%
class EMA:
    def __init__(self, model, decay=0.95):
        self.decay = decay
        self.shadow = copy.deepcopy(model).eval()
        for p in self.shadow.parameters():
            p.requires_grad_(False)
        self.updates = 0

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for mine, theirs in zip(self.shadow.parameters(), model.parameters()):
            mine.mul_(decay).add_(theirs, alpha=1 - decay)
        for mine, theirs in zip(self.shadow.buffers(), model.buffers()):
            mine.copy_(theirs)


class Regressor(nn.Module):
    def __init__(self, inputs, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.LayerNorm(hidden), nn.Linear(hidden, 1))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.net(x).squeeze(-1)


model = Regressor(features.shape[1])
ema = EMA(model)
swa_model = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
loss_fn = nn.SmoothL1Loss()
weights_seen = []

# %% distributed
model.train()
for epoch in range(3):
    for x, y in loader:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        ema.update(model)
    swa_model.update_parameters(model)
    weights_seen.append(model.net[0].weight.detach().norm().item())

# %%
ema.decay = 0.9
after_first = {k: v.clone() for k, v in ema.shadow.state_dict().items()}

# %% distributed
for _ in range(2):
    for x, y in loader:
        loss = loss_fn(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        ema.update(model)
    swa_model.update_parameters(model)
    weights_seen.append(model.net[0].weight.detach().norm().item())


# %%
@torch.no_grad()
def r2(net):
    net.eval()
    x, y = zip(*test_set)
    x, y = torch.stack(x), torch.stack(y)
    return 1 - float(((net(x) - y) ** 2).sum() / ((y - y.mean()) ** 2).sum())


scores = {"model": r2(model), "ema": r2(ema.shadow), "swa": r2(swa_model)}
distance = sum((a - b).norm().item() for a, b in zip(model.parameters(), ema.shadow.parameters()))
