# %%
"""pytorch/examples, mnist: a CNN, train() and test(), accuracy of the whole test set, StepLR, a saved model."""

import os
import shutil
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
use_cuda = torch.cuda.is_available()
device = torch.device("cuda" if use_cuda else "cpu")
target = torch.arange(40) % 4
image = torch.randn(4, 1, 8, 8)[target] + torch.randn(40, 1, 8, 8)
train_loader = DataLoader(TensorDataset(image[:24], target[:24]), batch_size=8, shuffle=True)
test_loader = DataLoader(TensorDataset(image[24:], target[24:]), batch_size=10)
path = os.path.join(tempfile.mkdtemp(), "mnist_cnn.pt")
seen = []


# %%
class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 6, 3, 1)
        self.dropout1 = nn.Dropout(0.0)
        self.fc1 = nn.Linear(24, 12)
        self.fc2 = nn.Linear(12, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.max_pool2d(x, 2)
        x = self.dropout1(x)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        return F.log_softmax(self.fc2(x), dim=1)


def train(model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    test_loss /= len(test_loader.dataset)
    seen.append((test_loss, correct))


model = Net().to(device)
optimizer = optim.Adadelta(model.parameters(), lr=1.0, eps=1e-4)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)

# %% distributed
for epoch in range(1, 3):
    train(model, device, train_loader, optimizer, epoch)
    test(model, device, test_loader)
    scheduler.step()
torch.save(model.state_dict(), path)

# %%
result = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "tests": seen,
    "lr": scheduler.get_last_lr(),
    "saved": torch.load(path),
}
shutil.rmtree(os.path.dirname(path))
