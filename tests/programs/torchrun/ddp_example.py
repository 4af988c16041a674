"""In the manner of pytorch's examples/distributed/ddp/example.py: one process per rank, told who it is by torchrun."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.optim as optim
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank):
    torch.manual_seed(0)
    ddp_model = DDP(ToyModel())
    torch.manual_seed(rank)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    for _ in range(5):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        loss_fn(outputs, torch.randn(20, 5)).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in ddp_model.parameters()])


def spmd_main(out):
    env = {key: os.environ[key] for key in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")}
    assert all(env.values())
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    assert (dist.get_world_size(), dist.get_backend()) == (int(env["WORLD_SIZE"]), "gloo")
    weights = demo_basic(rank)
    if rank == 0:
        torch.save(weights, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=str, default=os.environ.get("OUT"))
    spmd_main(parser.parse_args().out)
