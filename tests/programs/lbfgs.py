# %%
"""Fits a curve with LBFGS: the whole data in one closure first, then batches of a loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
torch.manual_seed(3)

# %%
x = torch.linspace(-3, 3, 256).unsqueeze(1)
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)
loader = DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True)

# %%
model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
mse = nn.MSELoss()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, history_size=5)
losses = []
closure_calls = 0


def closure():
    global closure_calls
    optimizer.zero_grad()
    loss = mse(model(x), y)
    loss.backward()
    closure_calls += 1
    return loss


# %% distributed
for step in range(4):
    loss = optimizer.step(closure)
    losses.append(loss.item())

# %%
whole_fit = model(x).detach()
careful = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
batch_losses = []

# %% distributed
for epoch in range(2):
    for xb, yb in loader:

        def batch_closure():
            careful.zero_grad()
            loss = mse(model(xb), yb)  # noqa: B023
            loss.backward()
            return loss

        batch_losses.append(careful.step(batch_closure).item())

# %% distributed
for _ in range(2):
    losses.append(optimizer.step(closure).item())

# %%
fit = model(x).detach().squeeze(1)
error = mse(model(x), y).item()
evaluations = careful.state[careful._params[0]]["func_evals"]
plot = list(zip(x.squeeze(1).tolist(), fit.tolist()))[::32]
