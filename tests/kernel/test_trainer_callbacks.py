"""What a Trainer may be given besides a module and a loader: averages of weights, searches, several loaders, and
predictions that are more than memory should hold."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain import registry
from tests.support.absent import absent
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook
from tests.support.trainer import trained

START = """
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from nbtrain.trainer.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging

class Normed(Net):
    def __init__(self, norm=True):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Linear(8, 2))

def averaged_alone(norm, size=16, epochs=5, first=2):
    "The loop of torch's documentation."
    net = Normed(norm); (optimizer,), (scheduler,) = net.configure_optimizers()
    average = AveragedModel(net); last = SWALR(optimizer, 0.05, 2)
    loader = DataLoader(TensorDataset(X, Y), size)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad(); F.cross_entropy(net(x), y).backward(); optimizer.step()
        if epoch >= first:
            average.update_parameters(net); last.step()
        else:
            scheduler.step()
    if norm:
        update_bn(loader, average)
    return average.module
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with trained(tmp_path_factory) as kernel:
        assert kernel.run(START).error is None
        yield kernel


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(kernel, "")
    yield made
    made("%distributed stop")


@pytest.mark.sample("ddp", "fsdp")
@pytest.mark.parametrize(
    "strategy", ["ddp", "zero1", "sharded", "fsdp", "deepspeed --stage 2", "deepspeed --stage 3", "horovod"]
)
def test_averaged_weights_are_those_of_one_process(notebook: Notebook, strategy: str) -> None:
    for package in registry.strategy(strategy.partition(" ")[0]).needs.packages:
        if find_spec(package) is None:
            absent(f"{package} is not installed", f"pip install {package}")
    notebook(f"""
average = StochasticWeightAveraging(0.05, 3, annealing_epochs=2)
net = Normed(False); t = trainer(strategy={strategy!r}, max_epochs=5, callbacks=[average]); t.fit(net, data)
""")
    assert notebook("alike(net, averaged_alone(False))").value == "True"
    assert notebook("average.average.n_averaged.item(), t.optimizers[0].param_groups[0]['lr']").value == "(3, 0.05)"


def test_averaged_weights_have_statistics_of_their_own(notebook: Notebook) -> None:
    """Batch norm's, counted anew with the averaged weights. Under ddp each rank normalizes its own part of a batch, so
    the loop that is compared with runs on ranks, too."""
    notebook("""
net = Normed(); t = trainer(max_epochs=5, callbacks=[StochasticWeightAveraging(0.05, 0.6, annealing_epochs=2)])
t.fit(net, data)
""")
    notebook("""%%distributed -d 2 -s ddp
other = averaged_alone(True, 8)""")
    assert notebook("all(torch.allclose(a, b, atol=1e-5) for a, b in zip(net.buffers(), other.buffers()))").value == (
        "True"
    )
    assert notebook("alike(net, other), 'batch_statistics' in t.loop()").value == "(True, True)"


def test_an_average_goes_on_from_a_checkpoint(notebook: Notebook) -> None:
    notebook("""
def average(): return StochasticWeightAveraging(0.05, 3, annealing_epochs=2)
kept = ModelCheckpoint(save_top_k=-1)
net = Normed(False); trainer(max_epochs=5, callbacks=[average(), kept]).fit(net, data)
middle = next(path for path in kept.best_k_models if "epoch=3" in path)
other = Normed(False); trainer(max_epochs=5, strategy="fsdp", callbacks=[average()]).fit(other, data, ckpt_path=middle)
""")
    assert notebook("alike(net, other)").value == "True"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_module_gets_its_average_after_stop_in_the_last_validation(notebook: Notebook, strategy: str) -> None:
    """That of the epochs before; and batch norm's statistics of all batches, though the second fit has seen none."""
    notebook(f"""
class Waits(Normed):
    waits = True
    def validation_step(self, batch, batch_idx): pass
    def on_validation_end(self):
        while self.waits and self.trainer.current_epoch == 4: print("it waits"); time.sleep(0.1)
import time
net = Waits({strategy == "ddp"})
t = trainer(max_epochs=5, strategy={strategy!r}, callbacks=[StochasticWeightAveraging(0.05, 3, annealing_epochs=2)])
""")
    kernel = notebook.kernel
    result = kernel.start("t.fit(net, data, data)")
    kernel.wait_for(lambda: "it waits" in result.stdout)
    kernel.interrupt()
    kernel.wait(result)
    shown = notebook("net.waits = False; t.fit(net, data, data)").text
    assert "5 epochs, 20 steps are done: the module gets its averaged weights" in shown
    assert notebook("t.current_epoch, t.averaging.has_ended, int(t.averaging.average.n_averaged)").value == (
        "(5, True, 2)"
    )
    assert notebook("alike(net, t.averaging.average.module)").value == "True"
    if strategy == "ddp":
        assert notebook("int(net.layers[1].num_batches_tracked) == len(data)").value == "True"


def test_a_learning_rate_is_found_on_a_copy(notebook: Notebook) -> None:
    notebook("""
class Slow(Net):
    def __init__(self):
        super().__init__()
        self.learning_rate = 1e-7
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.learning_rate)
find = LearningRateFinder(min_lr=1e-6, max_lr=100.0, num_training_steps=60)
net = Slow(); before = torch.get_rng_state()
t = trainer(max_epochs=0, callbacks=[find], num_sanity_val_steps=0); t.fit(net, data)
""")
    assert notebook("1e-3 < net.learning_rate < 10, net.learning_rate == find.optimal_lr.suggestion()").value == (
        "(True, True)"
    )
    assert notebook("alike(net, Slow()), net.seen, t.global_step, t.optimizers[0].param_groups[0]['lr']").value == (
        "(True, [], 0, " + notebook("net.learning_rate").value + ")"
    )
    assert notebook(
        "torch.equal(before, torch.get_rng_state()), len(find.optimal_lr.plot(suggest=True).axes)"
    ).value == ("(True, 1)")
    notebook("""
class Fixed(Slow):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.3)
""")
    fixed = "trainer(callbacks=[LearningRateFinder(num_training_steps=30)]).fit(Fixed(), data)"
    assert "configure_optimizers does not read it" in notebook.fails(fixed).evalue
    assert (
        "neither the module nor" in notebook.fails("trainer(callbacks=[LearningRateFinder()]).fit(Net(), data)").evalue
    )


def test_a_search_sees_what_a_fit_sees(notebook: Notebook) -> None:
    """A plain module that logs, and a data module that changes its batches."""
    notebook(
        """
from nbtrain.trainer.callbacks import LearningRateFinder
class Plain(nn.Module):
    def __init__(self):
        super().__init__(); self.layers = nn.Linear(4, 2); self.lr = 0.1
    def training_step(self, batch, batch_idx):
        assert self.trainer.training and batch[0].abs().max() > 1000
        loss = F.cross_entropy(self.layers(batch[0] / 1e6), batch[1]); self.log("loss", loss); return loss
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), self.lr)
class Scaled(nbtrain.DataModule):
    def train_dataloader(self): return data
    def on_after_batch_transfer(self, batch, index): return batch[0] * 1e6, batch[1]
net = Plain(); finder = LearningRateFinder(num_training_steps=20); t = trainer(max_epochs=1, callbacks=finder)
t.fit(net, Scaled())""",
        120,
    )
    assert notebook("t.global_step, 'loss' in t.callback_metrics, 'log' in vars(net)").value == "(4, True, False)"


def test_the_largest_batch_is_found_and_used(notebook: Notebook) -> None:
    notebook(
        """
class Wide(Net):
    def __init__(self):
        super().__init__()
        self.batch_size = 8
    def training_step(self, batch, batch_idx):
        self.most = max(getattr(self, "most", 0), len(batch[0]))
        if len(batch[0]) > 40:
            raise torch.OutOfMemoryError("this batch does not fit")
        return F.cross_entropy(self(batch[0]), batch[1])
    def train_dataloader(self):
        return DataLoader(TensorDataset(X.repeat(50, 1), Y.repeat(50)), self.batch_size)
find = BatchSizeFinder(steps_per_trial=2)
net = Wide(); t = trainer(max_steps=1, callbacks=[find]); t.fit(net)
""",
        120,
    )
    assert notebook("32 <= net.batch_size <= 40, find.optimal_batch_size == net.batch_size == net.most").value == (
        "(True, True)"
    )
    given = "trainer(callbacks=[BatchSizeFinder()]).fit(Net(), data)"
    assert "has its size already" in notebook.fails(given).evalue


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_training_loaders_are_one(notebook: Notebook, strategy: str) -> None:
    """The shorter one begins anew; the epoch is as long as the longer one."""
    notebook(f"""
class Two(Net):
    def training_step(self, batch, batch_idx):
        a, b = batch["a"], batch["b"]
        return F.cross_entropy(self(a[0]), a[1]) + self(b[0]).pow(2).mean()
short = DataLoader(TensorDataset(X[:32] * 2), 8)
net = Two(); t = trainer(strategy={strategy!r}); t.fit(net, {{"a": data, "b": short}})
alone = Net(); (optimizer,), (scheduler,) = alone.configure_optimizers()
for _ in range(2):
    for step in range(4):
        at, other = 16 * step, 16 * (step % 2)
        optimizer.zero_grad()
        loss = F.cross_entropy(alone(X[at:at + 16]), Y[at:at + 16]) + alone(X[other:other + 16] * 2).pow(2).mean()
        loss.backward(); optimizer.step()
    scheduler.step()
""")
    assert notebook("alike(net, alone), t.global_step").value == "(True, 8)"


def test_predictions_that_are_much_are_files(notebook: Notebook) -> None:
    notebook("""
net = Net(); t = trainer(); t.predictions_in_memory = 300
found = t.predict(net, DataLoader(TensorDataset(X), 8))
""")
    assert notebook("type(found).__name__, len(found), [one['index'] for one in found]").value == (
        "('Predictions', 8, [0, 1, 2, 3, 4, 5, 6, 7])"
    )
    shown = "torch.allclose(torch.cat([one['out'] for one in found[2:]]), net(X[16:]), atol=1e-6)"
    assert notebook(shown).value == "True"
    assert notebook("0 < len(os.listdir(os.path.join(t.predictions_folder, 'loader_0'))) < 8").value == "True"
