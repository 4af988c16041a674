# %%
"""WGAN-GP: the penalty on the critic's gradient with respect to points between real and made samples.

Noise is made of each sample, so that ranks have the same.
"""

import torch
import torch.nn as nn
from torch.autograd import Variable, grad
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
LAMBDA, CRITIC_ITERS = 0.1, 2
data = torch.cat([torch.randn(24, 2), torch.randn(24, 2), torch.rand(24, 1)], 1)
loader = DataLoader(TensorDataset(data), batch_size=8, shuffle=True)


# %%
class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 2))

    def forward(self, noise):
        return self.main(noise)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(2, 8), nn.Softplus(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, inputs):
        return self.main(inputs).view(-1)


netG, netD = Generator(), Discriminator()
optimizerD = torch.optim.Adam(netD.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-4)
optimizerG = torch.optim.Adam(netG.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-4)


def calc_gradient_penalty(netD, real_data, fake_data, alpha):
    interpolates = alpha * real_data + (1 - alpha) * fake_data
    interpolates = Variable(interpolates, requires_grad=True)
    disc_interpolates = netD(interpolates)
    gradients = grad(
        outputs=disc_interpolates,
        inputs=interpolates,
        grad_outputs=torch.ones(disc_interpolates.size()),
        create_graph=True,
        retain_graph=True,
        only_inputs=True,
    )[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * LAMBDA


# %% distributed
for epoch in range(2):
    for i, (batch,) in enumerate(loader):
        real, noise, alpha = batch[:, :2], batch[:, 2:4], batch[:, 4:]
        for p in netD.parameters():
            p.requires_grad = True
        for _ in range(CRITIC_ITERS):
            netD.zero_grad()
            with torch.no_grad():
                fake = netG(noise)
            penalty = calc_gradient_penalty(netD, real, fake, alpha)
            D_cost = netD(fake).mean() - netD(real).mean() + penalty
            D_cost.backward()
            optimizerD.step()
        for p in netD.parameters():
            p.requires_grad = False
        netG.zero_grad()
        G_cost = -netD(netG(noise)).mean()
        G_cost.backward()
        optimizerG.step()

# %%
result = {
    "G": netG.state_dict(),
    "D": netD.state_dict(),
    "optG": optimizerG.state_dict(),
    "optD": optimizerD.state_dict(),
}
