"""What `nbtrain.Trainer` costs beside the loop that a user would have written, and how soon its functions are there."""

from __future__ import annotations

from functools import partial

from benchmarks.measure import Table, in_turns, kernel, run

START = """
import contextlib, io, time, torch, nbtrain
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
class Net(nbtrain.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 10))
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.01)
class Row(nn.Module):
    def __init__(self):
        super().__init__(); self.layers = nn.Linear(10, 10)
    def predict_step(self, batch, batch_idx): return self.layers(batch[0])
net, model, row = Net(), Net(), Row()
optimizer = model.configure_optimizers()
data = DataLoader(TensorDataset(torch.randn(100 * 2 * 64, 256), torch.randint(10, (100 * 2 * 64,))), 64)
small = DataLoader(TensorDataset(torch.randn(4 * 64, 256), torch.randint(10, (4 * 64,))), 64)
rows = DataLoader(TensorDataset(torch.randn(1_000_000, 10)), 10_000)
usual = dict(accelerator="cpu", devices=2, strategy="ddp", enable_progress_bar=False, enable_checkpointing=False)
trainer, short = nbtrain.Trainer(max_epochs=0, **usual), nbtrain.Trainer(max_epochs=0, **usual)
predicting = nbtrain.Trainer(**usual)
LOOP = '''
for x, y in data:
    loss = F.cross_entropy(model.layers(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    log(loss=loss)
'''
def seconds(function):
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        function()
    return time.perf_counter() - start
def one_more(trainer, loader):
    trainer.max_epochs += 1; trainer.fit(net, loader)
def plain(): return seconds(lambda: get_ipython().run_cell_magic("distributed", "-s ddp -d 2 --monitor off", LOOP))
def fitted(): return seconds(lambda: one_more(trainer, data))
def again(): return seconds(lambda: one_more(short, small))
def predicted(): return seconds(lambda: predicting.predict(row, rows))
def alone():
    with torch.no_grad():
        return seconds(lambda: [row.predict_step(batch, 0) for batch in rows])
"""


def main() -> None:
    table = Table("nbtrain.Trainer, 2 ranks")
    with kernel("%load_ext nbtrain", START) as k:

        def seconds(what: str) -> float:
            return float(run(k, f"import json; print('measured:' + json.dumps({what}()))"))

        for what in ("plain", "fitted", "again", "predicted", "alone"):
            seconds(what)
        hand, fit = in_turns(9, partial(seconds, "plain"), partial(seconds, "fitted"))
        table.row("fit, 100 steps, by the loop by hand", fit / hand, 1.01, "×", f"by hand: {1e3 * hand:.0f} ms")
        _, second = in_turns(9, partial(seconds, "plain"), partial(seconds, "again"))
        table.row("another fit of 2 steps on a resident model", 1e3 * second, 50.0, "ms")
        one, whole = in_turns(5, partial(seconds, "alone"), partial(seconds, "predicted"))
        control = f"one process alone: {1e3 * one:.0f} ms"
        table.row("predict a million rows of 10, home, by one process's time", whole / one, 2.0, "×", control)


if __name__ == "__main__":
    main()
