# %%
"""Cross validation: a function builds a model, an optimizer and loaders of its own for every fold."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

# %%
features, labels = load_wine(return_X_y=True)
features = ((features - features.mean(0)) / features.std(0)).astype(np.float32)
dataset = TensorDataset(torch.from_numpy(features), torch.from_numpy(labels))
folds = list(StratifiedKFold(3, shuffle=True, random_state=0).split(features, labels))


# %%
def make_model(hidden):
    return nn.Sequential(nn.Linear(features.shape[1], hidden), nn.ReLU(), nn.Linear(hidden, 3))


def run_fold(train_index, test_index, hidden, epochs=4):
    model = make_model(hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Subset(dataset, train_index.tolist()), batch_size=16, shuffle=True, drop_last=True)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        x, y = dataset[test_index.tolist()]
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    return model, accuracy


def cross_validate(hidden):
    models, accuracies = [], []
    for train_index, test_index in folds:
        model, accuracy = run_fold(train_index, test_index, hidden)
        models.append(model)
        accuracies.append(accuracy)
    return models, accuracies


results = {}

# %% distributed
torch.manual_seed(5)
models, results[4] = cross_validate(hidden=4)

# %%
mean = {hidden: float(np.mean(accuracies)) for hidden, accuracies in results.items()}

# %% distributed
torch.manual_seed(5)
for hidden in (8, 16):
    models, results[hidden] = cross_validate(hidden)

# %%
mean = {hidden: float(np.mean(accuracies)) for hidden, accuracies in results.items()}
best = max(mean, key=mean.get)
with torch.no_grad():
    votes = torch.stack([model(dataset.tensors[0]).argmax(1) for model in models]).mode(0).values
ensemble_accuracy = (votes == dataset.tensors[1]).float().mean().item()
assert ensemble_accuracy > 0.9
