# %%
"""A class that holds its model, optimizer and data, and has a fit method."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)

# %%
x, y = load_iris(return_X_y=True)
x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
y = torch.tensor(y)
order = torch.randperm(len(x))
train_data = TensorDataset(x[order[:128]], y[order[:128]])
held_out = x[order[128:]], y[order[128:]]


# %%
class Classifier:
    def __init__(self, sizes, lr=0.05):
        layers = []
        for i, (before, after) in enumerate(zip(sizes, sizes[1:])):
            layers.append(nn.Linear(before, after))
            if i < len(sizes) - 2:
                layers.append(nn.Tanh())
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.history = {"loss": [], "lr": [], "accuracy": []}
        self.epochs_done = 0

    def fit(self, data, epochs, batch_size=32):
        loader = DataLoader(data, batch_size=batch_size, shuffle=True)
        self.model.train()
        for _ in range(epochs):
            total = 0.0
            for x, y in loader:
                total += self._step(x, y) * len(x)
            self.history["loss"].append(total / len(data))
            self.history["lr"].append(self.scheduler.get_last_lr()[0])
            self.history["accuracy"].append(self.score(*held_out))
            self.scheduler.step()
            self.epochs_done += 1
        return self

    def _step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def loss(self, out, y):
        return F.cross_entropy(out, y)

    def predict(self, x):
        self.model.eval()
        with torch.no_grad():
            out = self.model(x).argmax(1)
        self.model.train()
        return out

    def score(self, x, y):
        return (self.predict(x) == y).float().mean().item()


class SmoothClassifier(Classifier):
    def loss(self, out, y):
        return super().loss(out, y) + 0.1 * F.log_softmax(out, 1).logsumexp(1).mean()


learner = SmoothClassifier([4, 16, 3])
model = learner.model
first_layer = model[0]

# %% distributed
learner.fit(train_data, epochs=5)

# %%
scores = [learner.score(*held_out)]
rates = list(learner.history["lr"])
learner.note = "after five"

# %% distributed
learner.fit(train_data, epochs=3, batch_size=64)
learner.finished = True

# %%
scores.append(learner.score(*held_out))
assert learner.model is model
assert model[0] is first_layer
assert learner.optimizer.param_groups[0]["params"][0] is first_layer.weight
assert learner.scheduler.optimizer is learner.optimizer
plot = {key: list(values) for key, values in learner.history.items()}
