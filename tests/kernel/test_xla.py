"""`xla` where torch_xla is installed: a cell trains as one process does, on XLA's CPU device.

No TPU was ever asked. `pip install torch_xla==2.9.0 torch==2.9.0` in an environment of its own has what this test
needs: CI has it not, for it goes with no other torch.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec

import pytest

from tests.support.kernels import running_kernel
from tests.support.notebook import Notebook as Cells

HERE = find_spec("torch_xla") is not None

START = """
import copy, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
def fresh():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, opt, torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
loader = DataLoader(data, batch_size=8)
model, opt, sched = fresh()
params, losses, ids = list(model.parameters()), [], list(map(id, model.parameters()))
other, opt1, sched1 = fresh()
"""

LOOP = """
for x, y in loader:
    loss = F.cross_entropy(model(x), y); loss.backward()
    nn.utils.clip_grad_norm_(params, 0.5); opt.step(); opt.zero_grad(); sched.step(); losses.append(reduce(loss.item()))
"""

ALONE = """
for _ in range(2):
    for a, b in loader:
        F.cross_entropy(other(a), b).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5); opt1.step(); opt1.zero_grad(); sched1.step()
"""


@pytest.mark.kernel
@pytest.mark.limit(240)
@pytest.mark.skipif(not HERE, reason="torch_xla is not installed (pip install torch_xla torch==2.9.0, elsewhere)")
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_trains_as_one_process_does(ranks: int) -> None:
    """And the kernel has not touched XLA, the objects are the notebook's own, and a second cell carries on."""
    with (
        tempfile.TemporaryDirectory() as folder,
        running_kernel(PJRT_DEVICE="CPU", XDG_RUNTIME_DIR=folder, TMPDIR=folder) as kernel,
    ):
        cells = Cells(kernel, START)
        for _ in range(2):
            shown = cells(f"%%distributed -s xla -d {ranks} --split-batches{LOOP}", 100)
            assert "differs from rank" not in shown.text
        cells(ALONE)
        cells("assert len(losses) == 16 and ids == list(map(id, model.parameters())) == list(map(id, params))")
        cells("assert 'torch_xla' not in __import__('sys').modules and x.device.type == 'cpu'")
        cells("assert all(torch.allclose(p, q, atol=1e-5) for p, q in zip(model.parameters(), other.parameters()))")
        cells("state = [(opt.state[p], opt1.state[q]) for p, q in zip(model.parameters(), other.parameters())]")
        cells("assert all(torch.allclose(a[key], b[key], atol=1e-6) for a, b in state for key in b)")
        cells("assert sched.last_epoch == sched1.last_epoch == 16")
        cells(f"%%distributed -s xla -d {ranks}\ntorch.save(model.state_dict(), 'weights.pt')\n"
              "average = copy.deepcopy(model); save('whole', full=True)", 100)  # fmt: skip
        cells("read = torch.load('weights.pt')")
        cells("assert all(torch.equal(read[k], v) and torch.equal(average.state_dict()[k], v)"
              "           for k, v in model.state_dict().items())")  # fmt: skip
        cells("%distributed stop")
