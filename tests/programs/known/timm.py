# %%
"""timm's train.py: mixup with soft targets, label smoothing, an average of the weights (ModelEmaV2), cosine by updates.

The data set gives each sample with the one that it is mixed with, so that shares of a batch are mixed as the whole is.
"""

import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(42)
num_classes = 4
images, targets = torch.randn(24, 3, 6, 6), torch.arange(24) % num_classes
dataset = TensorDataset(images, targets)
pairs = TensorDataset(images, targets, images.roll(1, 0), targets.roll(1, 0))
loader_train = DataLoader(pairs, batch_size=8, shuffle=True, drop_last=True)
loader_eval = DataLoader(dataset, batch_size=10)


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    def _update(self, model, update_fn):
        with torch.no_grad():
            for ema_v, model_v in zip(self.module.state_dict().values(), model.state_dict().values()):
                ema_v.copy_(update_fn(ema_v, model_v))

    def update(self, model):
        self._update(model, update_fn=lambda e, m: self.decay * e + (1.0 - self.decay) * m)

    def set(self, model):
        self._update(model, update_fn=lambda e, m: m)


class Mixup:
    def __init__(self, mixup_alpha=0.8, label_smoothing=0.1):
        self.rng = np.random.default_rng(0)
        self.alpha, self.smoothing = mixup_alpha, label_smoothing

    def one_hot(self, target):
        off = self.smoothing / num_classes
        return torch.full((len(target), num_classes), off).scatter_(1, target.unsqueeze(1), 1 - self.smoothing + off)

    def __call__(self, x, target, other, other_target):
        lam = float(self.rng.beta(self.alpha, self.alpha))
        return x * lam + other * (1 - lam), self.one_hot(target) * lam + self.one_hot(other_target) * (1 - lam)


class SoftTargetCrossEntropy(nn.Module):
    def forward(self, x, target):
        return torch.sum(-target * F.log_softmax(x, dim=-1), dim=-1).mean()


# %%
class ConvBlock(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.conv = nn.Conv2d(inp, out, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, out)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(ConvBlock(3, 4), ConvBlock(4, 4), ConvBlock(4, 4))
        self.head = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.head(self.stages(x).mean((2, 3)))


def param_groups_weight_decay(model, weight_decay=0.05):
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": weight_decay}]


model = Net()
model_ema = ModelEmaV2(model)
optimizer = torch.optim.AdamW(param_groups_weight_decay(model), lr=1e-2, eps=1e-4)
lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
mixup_fn, train_loss_fn = Mixup(), SoftTargetCrossEntropy()


def train_one_epoch(epoch):
    model.train()
    for batch_idx, batch in enumerate(loader_train):
        input, target = mixup_fn(*batch)
        output = model(input)
        loss = train_loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model_ema.update(model)
        lr_scheduler.step()


@torch.inference_mode()
def validate(model):
    model.eval()
    top1 = n = 0
    for input, target in loader_eval:
        top1 += (model(input).argmax(1) == target).sum().item()
        n += len(target)
    return 100 * top1 / n


summary = []

# %% distributed
for epoch in range(2):
    train_one_epoch(epoch)
    summary.append((validate(model), validate(model_ema.module)))

# %%
result = {
    "model": model.state_dict(),
    "ema": model_ema.state_dict(),
    "optimizer": optimizer.state_dict(),
    "summary": summary,
    "lr": lr_scheduler.get_last_lr(),
}
