# %%
"""Handwritten digits with a small CNN; the best weights are kept by deepcopy(state_dict)."""

import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

# %%
images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
labels = torch.tensor(labels)
train_x, val_x, train_y, val_y = train_test_split(images, labels, train_size=1024, test_size=256, random_state=0)
train_set = TensorDataset(train_x, train_y)
val_set = TensorDataset(val_x, val_y)
train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
val_loader = DataLoader(val_set, batch_size=128)


# %%
class CNN(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.GroupNorm(4, 2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(2 * width * 4, 10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


model = CNN()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
device = next(model.parameters()).device


# %%
def train_epoch():
    model.train()
    total = 0.0
    for x, y in train_loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
    return total / len(train_loader)


@torch.no_grad()
def evaluate(loader):
    model.eval()
    correct = seen = 0
    loss_sum = 0.0
    for x, y in loader:
        out = model(x.to(device))
        loss_sum += F.cross_entropy(out, y.to(device), reduction="sum").item()
        correct += (out.argmax(1) == y.to(device)).sum().item()
        seen += len(y)
    return loss_sum / seen, correct / seen


train_losses, val_losses, val_accuracies = [], [], []
best_loss = float("inf")
best_state = None

# %% distributed
for epoch in range(2):
    train_losses.append(train_epoch())
    val_loss, val_accuracy = evaluate(val_loader)
    val_losses.append(val_loss)
    val_accuracies.append(val_accuracy)
    scheduler.step()
    if val_loss < best_loss:
        best_loss = val_loss
        best_state = copy.deepcopy(model.state_dict())
    print(f"epoch {epoch}: train {train_losses[-1]:.3f}, val {val_loss:.3f}, accuracy {val_accuracy:.2f}")

# %% distributed
for epoch in range(2, 4):
    train_losses.append(train_epoch())
    val_loss, val_accuracy = evaluate(val_loader)
    val_losses.append(val_loss)
    val_accuracies.append(val_accuracy)
    scheduler.step()
    if val_loss < best_loss:
        best_loss = val_loss
        best_state = copy.deepcopy(model.state_dict())

# %%
model.load_state_dict(best_state)
final_loss, final_accuracy = evaluate(val_loader)
curve = list(zip(range(len(val_losses)), val_losses))
with torch.no_grad():
    predictions = model(val_x).argmax(1)
confusion = torch.zeros(10, 10, dtype=torch.int64)
for truth, guess in zip(val_y, predictions):
    confusion[truth, guess] += 1
assert final_accuracy > 0.6
