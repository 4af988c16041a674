"""Lightning's `ddp_notebook`, a fork of the kernel: `Fabric` for a function, `Trainer` to train."""

from __future__ import annotations

from textwrap import indent

from benchmarks.peers.peer import Peer

HOW = 'accelerator="cpu", devices={ranks}, strategy="ddp_notebook"'
QUIET = "logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
FUNCTION = """
def cell(fabric):
{code}
lightning.Fabric({how}).launch(cell)
"""
HOME = """
{code}
class Holder(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.y = torch.nn.Parameter(torch.empty_like(y))
    def training_step(self, batch, index):
{indented}
        self.y.data.copy_(y)
    def configure_optimizers(self):
        return None
module = Holder()
loader = torch.utils.data.DataLoader([0], batch_size=None)
lightning.Trainer({how}, max_epochs=1, {quiet}).fit(module, loader)
y = module.y.detach()
"""
"""A tensor returned to Fabric raises FileNotFoundError: its process has ended. Weights of a module come home."""
MODULE = """
{make}
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.clock.end_step(loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)
    def on_train_start(self):
        self.clock = work.Clock(self.file)
    def on_train_batch_start(self, batch, index):
        self.clock.begin_step()
    def on_train_end(self):
        self.clock.end_loop()
        self.clock = None
    def loop(self, model, optimizer, batch, steps, file):
        self.file = file
        loader = torch.utils.data.DataLoader([batch] * steps, batch_size=None)
        lightning.Trainer({how}, max_steps=steps, {quiet}, use_distributed_sampler=False).fit(self, loader)
module = Module()
"""


class Lightning(Peer):
    name = "lightning"
    packages = ("lightning==2.6.6",)
    keeps_ranks = False

    def start(self, ranks: int) -> list[str]:
        return ["import warnings; warnings.filterwarnings('ignore')\nimport torch, lightning"]

    def cell(self, code: str, ranks: int) -> str:
        return FUNCTION.format(code=indent(code, "    "), how=HOW.format(ranks=ranks))

    send = cell

    def home(self, code: str, ranks: int) -> str:
        indented = indent(code, " " * 8)
        return HOME.format(code=code, indented=indented, how=HOW.format(ranks=ranks), quiet=QUIET)

    def make_model(self, make: str, ranks: int) -> list[str]:
        return [MODULE.format(make=make, how=HOW.format(ranks=ranks), quiet=QUIET)]

    def train(self, loop: str, ranks: int) -> str:
        return loop.replace("work.loop", "module.loop")
