# %%
"""A generative adversarial network on a ring of points: two models, two optimizers, label smoothing."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
latent_size = 4

# %%
angles = torch.rand(512) * 2 * math.pi
points = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(512, 2)
loader = DataLoader(TensorDataset(points), batch_size=64, shuffle=True, drop_last=True)

# %%
generator = nn.Sequential(nn.Linear(latent_size, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(32, 1))


def init_weights(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.2)
        nn.init.zeros_(m.bias)


generator.apply(init_weights)
discriminator.apply(init_weights)
opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(64, latent_size)
history = {"g": [], "d": []}
snapshots = []

# %% distributed
for epoch in range(3):
    for (real,) in loader:
        n = real.size(0)
        ones = torch.full((n, 1), 0.9)
        zeros = torch.zeros(n, 1)

        opt_d.zero_grad()
        fake = generator(torch.randn(n, latent_size))
        d_real = criterion(discriminator(real), ones)
        d_real.backward()
        d_fake = criterion(discriminator(fake.detach()), zeros)
        d_fake.backward()
        opt_d.step()

        opt_g.zero_grad()
        g_loss = criterion(discriminator(fake), ones)
        g_loss.backward()
        opt_g.step()

        history["g"].append(g_loss.item())
        history["d"].append((d_real + d_fake).item())
    with torch.no_grad():
        snapshots.append(generator(fixed_noise).clone())

# %%
epochs_so_far = len(snapshots)
discriminator.eval()

# %% distributed
for (real,) in loader:
    with torch.no_grad():
        fake = generator(torch.randn(len(real), latent_size))
    opt_d.zero_grad()
    loss = -(torch.sigmoid(discriminator(real)).log().mean() + (1 - torch.sigmoid(discriminator(fake))).log().mean())
    loss.backward()
    opt_d.step()

# %%
with torch.no_grad():
    samples = generator(fixed_noise).numpy()
radius = float((samples**2).sum(1).mean() ** 0.5)
steps = int(opt_d.state[discriminator[0].weight]["step"])
plot_data = [(i, g, d) for i, (g, d) in enumerate(zip(history["g"], history["d"]))]
