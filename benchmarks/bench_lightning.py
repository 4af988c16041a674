"""Lightning's own Trainer on nbtrain's ranks, beside Lightning under torchrun: a step, and when the first begins."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.measure import Table, in_turns, kernel, run

MODULE = """
import time, torch, lightning as L
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10))
        self.began = self.ended = self.first = 0.0
    def training_step(self, batch, batch_idx):
        if batch_idx == 0: self.first = time.time()
        if batch_idx == 20: self.began = time.perf_counter()
        return F.cross_entropy(self.layers(batch[0]), batch[1])
    def on_train_end(self): self.ended = time.perf_counter()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.01)
steps = 120
data = DataLoader(TensorDataset(torch.randn(steps * 2 * 64, 256), torch.randint(10, (steps * 2 * 64,))), 64)
usual = dict(accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
             enable_progress_bar=False, enable_model_summary=False)
def fitted(strategy):
    net = Net()
    L.Trainer(strategy=strategy, **usual).fit(net, data)
    return (net.ended - net.began) / (steps - 20)
"""
SCRIPT = f"""{MODULE}
import os
seconds = fitted("ddp")
if os.environ["RANK"] == "0": print("measured", seconds)
"""


def main() -> None:
    table = Table("Lightning's Trainer, 2 ranks")
    with tempfile.TemporaryDirectory() as folder, kernel("%load_ext nbtrain") as k:
        environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TMPDIR": folder}
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)

        def in_a_script() -> float:
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                "2",
                str(script),
            ]
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(done.stderr)
            return float(done.stdout.split("measured ")[1].split()[0])

        def here(what: str) -> float:
            return float(run(k, f"import json; print('measured:' + json.dumps({what}))"))

        run(k, MODULE)
        time.sleep(12)  # somebody writes the cell with the Trainer meanwhile
        first = "(lambda net, now: (L.Trainer(strategy='nbtrain_ddp', **usual).fit(net, data), net.first - now)[1])"
        table.row("from the first fit to its first step", here(f"{first}(Net(), time.time())"), 0.5, "s")
        table.row("from a second fit to its first step", here(f"{first}(Net(), time.time())"), 0.5, "s")
        theirs, ours = in_turns(5, in_a_script, partial(here, "fitted('nbtrain_ddp')"))
        table.row("a step, by Lightning's under torchrun", ours / theirs, 1.02, "×", f"torchrun: {1e3 * theirs:.1f} ms")


if __name__ == "__main__":
    main()
