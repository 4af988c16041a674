"""The loop of `work` as a script for `torchrun`, with DistributedDataParallel: what training is held against."""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers import work


def main(name: str, steps: str, file: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer, batch = work.make(name)
    work.loop(DistributedDataParallel(model), optimizer, batch, int(steps), file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
