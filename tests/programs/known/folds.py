# %%
"""k-fold: in every fold the model, its optimizer and loaders are made anew in the cell; the best fold is kept."""

import copy

import numpy as np
import torch
import torch.nn as nn
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

torch.manual_seed(42)
x = torch.randn(24, 5)
y = (x.sum(1) > 0).long()
dataset = TensorDataset(x, y)
kfold = KFold(n_splits=3, shuffle=True, random_state=42)


def reset_weights(m):
    if hasattr(m, "reset_parameters"):
        m.reset_parameters()


def build():
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


results, scores, best_score, best_model = {}, [], -1.0, None

# %% distributed
for fold, (train_ids, test_ids) in enumerate(kfold.split(np.arange(len(dataset)))):
    torch.manual_seed(fold)
    trainloader = DataLoader(Subset(dataset, train_ids), batch_size=4, shuffle=True)
    testloader = DataLoader(dataset, batch_size=4, sampler=SubsetRandomSampler(test_ids))
    network = build()
    network.apply(reset_weights)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-2, eps=1e-4)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        for inputs, targets in trainloader:
            optimizer.zero_grad()
            loss = criterion(network(inputs), targets)
            loss.backward()
            optimizer.step()
    correct, total = 0, 0
    network.eval()
    with torch.no_grad():
        for inputs, targets in testloader:
            predicted = network(inputs).argmax(1)
            total += targets.size(0)
            correct += (predicted == targets).sum().item()
    results[fold] = 100.0 * correct / total
    scores.append(correct / total)
    if scores[-1] > best_score:
        best_score, best_model = scores[-1], copy.deepcopy(network.state_dict())

# %%
average = sum(results.values()) / len(results)
result = {"network": network.state_dict(), "results": results, "average": average, "best": best_model}
