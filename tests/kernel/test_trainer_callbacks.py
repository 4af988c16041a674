"""What a Trainer may be given besides a module and a loader (averages of weights, searches, several loaders), and what
modules, data modules, callbacks and loggers ask it and are told."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain import registry
from tests.support.absent import absent
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook
from tests.support.trainer import trained

pytestmark = pytest.mark.thorough

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

class Data(nbtrain.DataModule):
    classes = 3
    def setup(self, stage): self.told = stage, self.trainer.world_size, self.trainer.num_devices
    def train_dataloader(self): return DataLoader(TensorDataset(X[:52], Y[:52]), 8)
    def val_dataloader(self): return [held_out, held_out]
    def on_after_batch_transfer(self, batch, index):
        assert self.trainer.training or self.trainer.validating or self.trainer.testing
        return batch[0] * 2, batch[1]

class Asks(Net):
    def setup(self, stage): self.classes_in_setup = self.trainer.datamodule.classes
    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        assert trainer.training and trainer.lightning_module is self and not trainer.evaluating
        if trainer.is_last_batch:
            self.log("last", float(batch_idx))
        self.log("batches", float(trainer.num_training_batches))
        self.log("classes", float(trainer.datamodule.classes))
        self.log("ranks", float(trainer.world_size))
        self.log("hidden", 1.0, logger=False)
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx, dataloader_idx):
        assert self.trainer.validating
        self.log("val_batches", float(self.trainer.num_val_batches[dataloader_idx]))
    def configure_optimizers(self):
        trainer = self.trainer
        self.planned = trainer.estimated_stepping_batches, trainer.num_training_batches, trainer.world_size
        return super().configure_optimizers()

class Log:
    def __init__(self): self.rows, self.hparams, self.status = [], None, None
    def log_metrics(self, metrics, step): self.rows.append((step, sorted(metrics)))
    def log_hyperparams(self, hparams): self.hparams = dict(hparams)
    def finalize(self, status): self.status = status
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


@pytest.mark.parametrize(
    ("strategy", "ranks", "batches"), [("ddp", 2, 4), ("dp", 1, 7), ("pipeline", 2, 7), ("single", 1, 7)]
)
def test_what_there_will_be_is_known_in_the_notebook_and_on_the_ranks(
    notebook: Notebook, strategy: str, ranks: int, batches: int
) -> None:
    """52 samples in batches of 8: 7 of them, of which two ranks see 4 each."""
    devices = 1 if strategy == "single" else 2
    made = f"trainer(strategy={strategy!r}, devices={devices}, max_epochs=3, accumulate_grad_batches=2)"
    notebook(f"net, data_module = Asks(), Data(); t = {made}; t.fit(net, datamodule=data_module)", 120)
    steps = 3 * -(-batches // 2)
    assert notebook("net.planned, t.global_step").value == f"(({steps}, {batches}, {ranks}), {steps})"
    assert notebook("data_module.told, data_module.trainer").value == f"(('fit', {ranks}, {ranks}), None)"
    assert notebook("net.classes_in_setup").value == "3"
    told = "{name: t.callback_metrics[name].item() for name in ('last', 'batches', 'classes', 'ranks')}"
    wanted = {"last": batches - 1.0, "batches": float(batches), "classes": 3.0, "ranks": float(ranks)}
    assert notebook(told).value == str(wanted)
    assert notebook("t.callback_metrics['val_batches/dataloader_idx_1'].item()").value == "4.0"
    assert notebook("t.train_dataloader, t.val_dataloaders, t.datamodule").value == "(None, None, None)"


def test_a_data_modules_own_batches_are_in_place_of_the_modules(notebook: Notebook) -> None:
    notebook("net = Asks(); t = trainer(max_epochs=1); t.fit(net, Data())")
    doubled = "DataLoader(TensorDataset(X[:52] * 2, Y[:52]), 8)"
    notebook(f"other = Net(); trainer(max_epochs=1).fit(other, {doubled})")
    assert notebook("alike(net, other)").value == "True"
    moving = "class Moves(Data):\n    def transfer_batch_to_device(self, batch, device, index): return batch"
    assert "transfer_batch_to_device of Moves" in notebook.fails(f"{moving}\ntrainer().fit(net, Moves())").evalue


def test_loggers_get_every_so_many_steps_and_each_epoch(notebook: Notebook) -> None:
    notebook("one, two = Log(), Log(); t = trainer(max_epochs=2, logger=[one, two], log_every_n_steps=3)")
    notebook("t.fit(Asks(), Data())", 60)
    assert notebook("one.rows == two.rows, t.logger is one, one.hparams, one.status").value == (
        "(True, True, {'rate': 0.2}, 'success')"
    )
    assert notebook("[step for step, _ in one.rows]").value == "[3, 4, 4, 6, 8, 8]", "the epoch's are of its last step"
    names = "('loss_step', 'loss_epoch', 'val_batches/dataloader_idx_0', 'hidden')"
    found = notebook(f"str([[name in row for name in {names}] for _, row in one.rows[:3]])").value
    assert found == "'[[True, False, False, False], [True, False, True, False], [False, True, False, False]]'"
    assert "a logger has log_metrics(metrics, step)" in notebook.fails("trainer(logger=3)").evalue
