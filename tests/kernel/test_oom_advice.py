"""A real cell that runs out of memory: the line that it is told needs less; what is held meanwhile."""

from __future__ import annotations

import re

import pytest

from tests.support.kernels import Kernel

pytestmark = pytest.mark.thorough

NET = """
import torch, torch.nn.functional as F
from tests.support.planned import transformer, transformer_batch
from torch.utils.data import DataLoader, TensorDataset
net = transformer(128, depth=6)
optimizer = torch.optim.AdamW(net.parameters())
loader = DataLoader(TensorDataset(*transformer_batch(64)), batch_size=16)
"""


@pytest.mark.thorough
def test_what_is_held_is_dealt_with_before_another_cell_runs(kernel: Kernel) -> None:
    kernel.run("%load_ext nbtrain")
    kernel.run(NET)
    cell = """%%distributed --devices 2 --monitor off
for step, (x, y) in enumerate(loader):
    F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step(); optimizer.zero_grad()
    if step: raise MemoryError("no more")
"""
    error = kernel.run(cell).error
    assert error is not None
    first, _, then = error.traceback.partition("The plan for net: ")
    assert "First: %distributed recover brings home what the ranks hold, or %distributed stop discards it." in first
    assert "--find-batch" not in first
    assert "--find-batch" in then
    assert "until step" in kernel.run("%distributed recover").text


def test_a_cell_that_runs_out_of_memory_says_the_line_that_needs_less(kernel: Kernel) -> None:
    kernel.run("%load_ext nbtrain")
    kernel.run(NET)
    cell = """%%distributed --devices 2 --monitor off
import resource
had = resource.getrlimit(resource.RLIMIT_DATA)
used = int(open("/proc/self/statm").read().split()[5]) * 4096
try:
    resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20), had[1]))
    torch.empty(10**9).fill_(1)
    for x, y in loader:
        F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
finally:
    resource.setrlimit(resource.RLIMIT_DATA, had)
"""
    error = kernel.run(cell).error
    assert error is not None
    found = re.search(
        r"The plan for net: .+ instead of \S+ MB: (%%distributed --strategy \S+ .*?)\. The", error.traceback
    )
    assert found is not None, error.traceback
    assert "The largest batch that fits: %%distributed --strategy ddp --devices 2" in error.traceback
    steps = (
        "for x, y in loader:\n    F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()\n    optimizer.step()"
    )
    assert kernel.run(f"{found[1]}\n{steps}\nprint('done')").error is None, found[1]
