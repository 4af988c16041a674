"""What a Trainer may be given besides a module and a loader (averages of weights, searches, several loaders), and what
modules, data modules, callbacks and loggers ask it and are told; and what people who know Lightning's Trainer take for
granted: modes of frozen layers, hooks, what a step is, where a fit goes on that was stopped; as Lightning has it."""

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
class Frozen(nbtrain.Module):
    "A backbone that is not trained, put into eval mode at some place."
    def __init__(self, place="__init__"):
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).requires_grad_(False)
        self.head, self.place = nn.Linear(8, 2), place
        self.frozen_at("__init__")
    def frozen_at(self, place):
        if place == self.place: self.backbone.eval()
    def on_fit_start(self): self.frozen_at("on_fit_start")
    def on_train_start(self): self.frozen_at("on_train_start")
    def on_train_epoch_start(self): self.frozen_at("on_train_epoch_start")
    def on_train_batch_start(self, *_): self.frozen_at("on_train_batch_start")
    def forward(self, x): return self.head(self.backbone(x))
    def training_step(self, batch, batch_idx):
        assert self.training and self.head.training
        return F.cross_entropy(self(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx):
        assert not (self.training or self.backbone.training or self.head.training)
    test_step = validation_step
    def predict_step(self, batch, batch_idx): return self(batch[0])
    def configure_optimizers(self): return torch.optim.SGD(self.head.parameters(), 0.1)

class Paused(Net):
    pause = False
    def training_step(self, batch, batch_idx):
        if self.pause: print("batch", self.trainer.current_epoch, batch_idx, flush=True); time.sleep(0.15)
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx):
        if self.pause: print("validation", self.trainer.current_epoch, batch_idx, flush=True); time.sleep(0.15)
        super().validation_step(batch, batch_idx)
def shuffled(): return DataLoader(TensorDataset(X, Y), 8, shuffle=True)
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
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "deepspeed --stage 3"])
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


def test_several_training_loaders_are_one(notebook: Notebook) -> None:
    """The shorter one begins anew; the epoch is as long as the longer one."""
    notebook("""
class Two(Net):
    def training_step(self, batch, batch_idx):
        a, b = batch["a"], batch["b"]
        return F.cross_entropy(self(a[0]), a[1]) + self(b[0]).pow(2).mean()
short = DataLoader(TensorDataset(X[:32] * 2), 8)
net = Two(); t = trainer(); t.fit(net, {"a": data, "b": short})
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


@pytest.mark.parametrize(("strategy", "ranks", "batches"), [("ddp", 2, 4), ("dp", 1, 7), ("pipeline", 2, 7)])
def test_what_there_will_be_is_known_in_the_notebook_and_on_the_ranks(
    notebook: Notebook, strategy: str, ranks: int, batches: int
) -> None:
    """52 samples in batches of 8: 7 of them, of which two ranks see 4 each."""
    made = f"trainer(strategy={strategy!r}, max_epochs=3, accumulate_grad_batches=2)"
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


def stopped(notebook: Notebook, kernel: Kernel, place: str, fit: str = "t.fit(net, loader, held_out)") -> None:
    running = kernel.start(fit)
    kernel.wait_for(lambda: place in running.text)
    kernel.interrupt()
    kernel.wait(running)
    assert running.error is not None
    assert running.error.ename == "KeyboardInterrupt"


@pytest.mark.parametrize(
    ("place", "strategy"),
    [
        ("__init__", "pipeline"), ("on_fit_start", "ddp"), ("on_train_start", "fsdp"), ("on_train_epoch_start", "ddp"),
        ("on_train_batch_start", "ddp"),
    ],
)  # fmt: skip
def test_layers_that_were_frozen_in_eval_mode_stay_so(notebook: Notebook, strategy: str, place: str) -> None:
    notebook(f"net = Frozen({place!r}); t = trainer(strategy={strategy!r}, num_sanity_val_steps=1)")
    notebook("t.fit(net, data, held_out)", 120)
    assert notebook("int(net.backbone[1].num_batches_tracked)").value == "0"
    notebook("t.validate(net, held_out, verbose=False); t.test(net, held_out); t.predict(net, held_out)", 60)
    modes = notebook("net.training, net.head.training, net.backbone.training, net.backbone[2].training").value
    assert modes == "(True, True, False, False)"


def test_steps_by_hand_are_counted_where_they_are_made(notebook: Notebook) -> None:
    notebook("""
class Hand(Net):
    automatic_optimization, steps = False, 0
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        if batch_idx % 2: optimizer.step(); optimizer.zero_grad(); self.steps += 1
net = Hand(); t = trainer(max_steps=3, max_epochs=-1); t.fit(net, data)""")
    assert notebook("net.steps, t.global_step").value == "(3, 3)"


@pytest.mark.parametrize(
    ("place", "strategy"),
    [("batch 0 1", "ddp"), ("batch 1 2", "fsdp"), ("validation 1 1", "ddp"), ("batch 1 2", "single")],
)
def test_a_fit_that_was_stopped_goes_on_where_it_was(
    notebook: Notebook, kernel: Kernel, strategy: str, place: str
) -> None:
    devices = 1 if strategy == "single" else 2
    made = f"trainer(strategy={strategy!r}, devices={devices}, max_epochs=3, num_sanity_val_steps=0)"
    notebook(f"torch.manual_seed(7); whole = Paused(); {made}.fit(whole, shuffled(), held_out)", 120)
    notebook(f"torch.manual_seed(7); net = Paused(); net.pause = True; loader = shuffled(); t = {made}")
    stopped(notebook, kernel, place)
    assert notebook("t.interrupted").value == "True"
    notebook("net.pause = False; t.fit(net, loader, held_out)", 120)
    steps = 3 * 64 // (8 * devices)
    assert notebook("t.current_epoch, t.global_step, t.interrupted").value == f"(3, {steps}, False)"
    assert notebook("alike(net, whole)").value == "True"
    assert notebook("net.seen == whole.seen").value == "True"


def test_another_loader_after_a_stop_begins_its_epoch(notebook: Notebook, kernel: Kernel) -> None:
    notebook("net = Paused(); net.pause = True; loader = data; t = trainer(max_epochs=1)")
    stopped(notebook, kernel, "batch 0 1")
    said = notebook("net.pause = False; n = t.global_step; t.fit(net, DataLoader(data.dataset, 4))").text
    assert "it begins anew" in said
    assert notebook("t.global_step - n, net.seen[-8:]").value == "(8, [0, 1, 2, 3, 4, 5, 6, 7])"


def test_what_hooks_are_given(notebook: Notebook) -> None:
    notebook("""
class Given:
    def __init__(self): self.losses, self.loaded, self.raised = [], None, None
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item()); assert not outputs["loss"].requires_grad
    def on_save_checkpoint(self, trainer, module, checkpoint): checkpoint.update(mine=len(self.losses), kind=nn.GELU)
    def on_load_checkpoint(self, trainer, module, checkpoint): self.loaded = checkpoint["mine"]
    def on_exception(self, trainer, module, error): print("raised", type(error).__name__, flush=True)
class Ends(Net):
    def training_epoch_end(self, outputs): self.outputs = [sorted(one) for one in outputs]
    def on_save_checkpoint(self, checkpoint): self.saved = getattr(self, "saved", 0) + 1
given, net = Given(), Ends(); t = trainer(max_epochs=1, callbacks=given); t.fit(net, data)
other, again = Given(), Ends(); u = trainer(max_epochs=1, callbacks=other)
last = t.checkpoint_callback.last_model_path; u.fit(again, data, ckpt_path=last, weights_only=False)""")
    assert notebook("len(given.losses), net.outputs == [['loss']] * 4, net.saved, other.loaded").value == (
        "(4, True, 1, 4)"
    )
    assert notebook("t.fit(net, data, ckpt_path='last'); given.loaded").value == "4", "its own, with a class in it"
    assert notebook("getattr(again, 'saved', 0)").value == "0", "a checkpoint that is read is not saved"
    raising = "class Raises(Net):\n    def training_step(self, batch, batch_idx): raise ValueError('on purpose')"
    failing = notebook.kernel.run(f"{raising}\ntrainer(callbacks=Given()).fit(Raises(), data)")
    assert failing.error is not None
    assert "raised ValueError" in failing.text


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("trainer(val_check_interval=0)", "val_check_interval=0: every so many batches"),
        ("trainer(max_time='1h')", "max_time='1h': {\"hours\": 1"),
        ("trainer(max_epochs='3')", "max_epochs='3': a whole number; -1 is without end"),
        ("trainer(max_epochs=2.0)", "max_epochs=2.0: a whole number"),
        ("trainer(limit_train_batches=1.5)", "limit_train_batches=1.5: a number of batches"),
        ("trainer(limit_val_batches=-1)", "limit_val_batches=-1"),
        ("trainer(accumulate_grad_batches=0)", "accumulate_grad_batches=0: a whole number from 1 on"),
        ("trainer(gradient_clip_val='0.5')", "gradient_clip_val='0.5': a number"),
        ("trainer(callbacks=[EarlyStopping])", "callbacks=[EarlyStopping] is a class: write"),
        ("trainer(reload_dataloaders_every_n_epochs=1)", "loaders are asked for once in a fit"),
        ("trainer().fit(torch.compile(Net()), data)", "write module.compile()"),
        ("trainer(limit_train_batches=0.5).fit(Net(), Stream())", "does not say how long it is"),
        ("trainer().fit(Upper(), data)", "returned a dict without 'loss': 'Loss'"),
        ("trainer().fit(Scheduler(), data)", "a dict with 'scheduler': write 'lr_scheduler'"),
        ("trainer().fit(Net(), data, ckpt_path=__import__('os').__file__)", "is a file, and a Trainer's checkpoint"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_write(notebook: Notebook, written: str, wanted: str) -> None:
    notebook("""
class Upper(Net):
    def training_step(self, batch, batch_idx): return {"Loss": super().training_step(batch, batch_idx)}
class Scheduler(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
class Rows(torch.utils.data.IterableDataset):
    def __iter__(self): return iter(zip(X, Y))
def Stream(): return DataLoader(Rows(), 8)""")
    assert wanted in notebook.fails(written).evalue


def test_a_module_is_made_of_a_checkpoint(notebook: Notebook) -> None:
    notebook("""
net = Net(0.3); t = trainer(max_epochs=1); t.fit(net, data); path = t.checkpoint_callback.last_model_path
found = Net.load_from_checkpoint(path); other = Net.load_from_checkpoint(path, rate=0.1)""")
    assert notebook("alike(found, net), found.hparams.rate, alike(other, net), other.hparams.rate").value == (
        "(True, 0.3, True, 0.1)"
    )


@pytest.mark.parametrize("own", [False, True], ids=["dealt out", "shared out by itself"])
def test_samplers_are_told_the_epoch_on_every_rank(notebook: Notebook, own: bool) -> None:
    notebook(f"""
class Ordered(torch.utils.data.Sampler):
    epoch = 0
    if {own}: num_replicas = 2
    def set_epoch(self, epoch): self.epoch = epoch
    def order(self):
        found = torch.randperm(64, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return found[trainer_rank()::2] if {own} else found
    def __len__(self): return 32 if {own} else 64
    def __iter__(self): return iter(self.order())
def trainer_rank():
    import builtins
    return getattr(builtins, "rank", 0)
class Order(nbtrain.Module):
    def __init__(self): super().__init__(); self.layer, self.firsts = nn.Linear(1, 1), []
    def training_step(self, batch, batch_idx):
        if not batch_idx: self.firsts.append(self.trainer.all_gather(batch[0, 0]).tolist())
        return self.layer(batch).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.0)
net = Order(); t = trainer(max_epochs=3)
t.fit(net, DataLoader(torch.arange(64.0).reshape(-1, 1), 8, sampler=Ordered()))
orders = [torch.randperm(64, generator=torch.Generator().manual_seed(n)).tolist() for n in range(3)]""")
    second = 1 if own else 8
    assert notebook(f"net.firsts == [[order[0], order[{second}]] for order in orders]").value == "True"
