"""What most cells of the end-to-end tests begin with, and how they are run.

notebook = Notebook(kernel)
notebook("model = net()")              # a cell that must not raise; what it shows is returned
notebook.fails("%%distributed\\n1/0")   # one that must; its error is returned
"""

from __future__ import annotations

from tests.support.kernels import Error, Kernel, Result

START = """
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
X = torch.randn(96, 4)
Y = (X.sum(1) > 0).long()
data = TensorDataset(X, Y)
def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)
"""

LOOP = """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
"""

TRAIN = "model = net(); opt = adamw(model); loader = DataLoader(data, batch_size=16, shuffle=True)"


class Notebook:
    """A kernel with nbtrain loaded and the names of START."""

    def __init__(self, kernel: Kernel, first: str = START) -> None:
        self.kernel = kernel
        self("get_ipython().extension_manager.load_extension('nbtrain');")
        if first:
            self(first)

    def __call__(self, code: str, timeout: float = 60) -> Result:
        result = self.kernel.run(code, timeout)
        assert result.error is None, f"{code}\n{result.text}"
        return result

    def fails(self, code: str, timeout: float = 60) -> Error:
        error = self.kernel.run(code, timeout).error
        assert error is not None, f"this should have raised:\n{code}"
        return error

    def refused(self, code: str) -> str:
        """A cell that the user is told not to write, in one line: that line."""
        result = self.kernel.run(code)
        shown = result.text.strip()
        assert "Traceback" not in shown, shown
        assert len(shown.splitlines()) == 1, shown
        return shown

    def in_background(self, code: str, options: str = "") -> Result:
        """Start a run that prints `epoch 0` before long; it trains when this returns."""
        began = self(f"%%distributed -d 2 --background --monitor off {options}{code}")
        assert "running>" in (began.value or "")
        self.kernel.wait_for(lambda: "epoch 0" in began.stdout)
        return began

    def pids(self) -> list[int]:
        """The processes of the ranks, as the notebook is told them."""
        status = self("%distributed status").stdout
        return [int(line.split("process ")[1].split()[0]) for line in status.splitlines() if "process " in line]

    def running(self) -> bool:
        return "no ranks are running" not in self("%distributed status").stdout
