# %%
"""Transfer learning: a network trained on some digits, frozen under a new head for the others, then thawed."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

torch.manual_seed(7)

# %%
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32)
labels = torch.tensor(labels)
old = labels < 6
old_x, old_y = images[old], labels[old]
new_x, new_y = images[~old][:512], labels[~old][:512] - 6


# %%
class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 48)
        self.bn = nn.BatchNorm1d(48)
        self.fc2 = nn.Linear(48, 24)

    def forward(self, x):
        return F.relu(self.fc2(F.relu(self.bn(self.fc1(x)))))


class Net(nn.Module):
    def __init__(self, backbone, classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.backbone(x))


pretrained = Net(Backbone(), 6)
pre_optimizer = torch.optim.Adam(pretrained.parameters(), lr=1e-2)
for _ in range(2):
    for i in torch.randperm(len(old_x)).split(128):
        pre_optimizer.zero_grad()
        F.cross_entropy(pretrained(old_x[i]), old_y[i]).backward()
        pre_optimizer.step()

# %%
model = Net(pretrained.backbone, 4)
for p in model.backbone.parameters():
    p.requires_grad = False
model.backbone.eval()
before = {name: p.detach().clone() for name, p in model.backbone.named_parameters()}
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
counts = torch.bincount(new_y)
sampler = WeightedRandomSampler((1.0 / counts)[new_y], num_samples=512)
loader = DataLoader(TensorDataset(new_x, new_y), batch_size=64, sampler=sampler)
learning_rates = []

# %% distributed
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

# %%
untouched = all(torch.equal(before[name], p) for name, p in model.backbone.named_parameters())
for p in model.backbone.fc2.parameters():
    p.requires_grad = True
optimizer.add_param_group({"params": list(model.backbone.fc2.parameters()), "lr": 0.01})
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)

# %% distributed
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    learning_rates.append([group["lr"] for group in optimizer.param_groups])

# %% distributed
for p in model.parameters():
    p.requires_grad = True
optimizer.add_param_group({"params": [*model.backbone.fc1.parameters(), *model.backbone.bn.parameters()], "lr": 0.002})
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
model.eval()
with torch.no_grad():
    accuracy = (model(new_x).argmax(1) == new_y).float().mean().item()
moved = {name: not torch.equal(before[name], p) for name, p in model.backbone.named_parameters()}
shared = pretrained.backbone is model.backbone
assert untouched
assert all(moved.values())
