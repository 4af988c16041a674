"""What modules, data modules, callbacks and loggers ask a Trainer and are told by it, by the names that they know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook
from tests.support.trainer import trained

START = """
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


def test_a_run_that_did_not_begin_leaves_nothing_to_the_next(notebook: Notebook) -> None:
    notebook("class Alone(Data):\n    def val_dataloader(self): return None")
    notebook("net = Net(); t = trainer(max_epochs=1); t.fit(net, Alone()); alone = trainer()")
    notebook("t.fit(net, Alone())")  # is done
    assert notebook("t.datamodule is None").value == "True"
    same = "t.validate(net, held_out, verbose=False) == alone.validate(net, held_out, verbose=False)"
    assert notebook(same).value == "True"
    failing = "class Fails(Net):\n    def configure_optimizers(self): raise ValueError('no')"
    assert notebook.fails(f"{failing}\nt.fit(Fails(), Alone())").evalue == "no"
    assert notebook("t.datamodule, t.train_dataloader").value == "(None, None)"


def test_steps_are_planned_for_a_schedule_of_accumulation_and_for_split_batches(notebook: Notebook) -> None:
    notebook("""
from nbtrain.trainer.callbacks import GradientAccumulationScheduler
net = Asks(); t = trainer(max_epochs=3, callbacks=GradientAccumulationScheduler({0: 4, 1: 2})); t.fit(net, Data())
other = Asks(); u = trainer(max_epochs=2, strategy="ddp --split-batches"); u.fit(other, Data())""")
    assert notebook("net.planned[0] == t.global_step == 5, other.planned[:2], u.global_step").value == (
        "(True, (14, 7), 14)"
    )


def test_loggers_are_closed_however_a_run_ends(notebook: Notebook) -> None:
    notebook("log = Log(); t = trainer(logger=log); t.test(Net(), held_out, verbose=False)")
    assert notebook("log.status, [names for _, names in log.rows]").value == "('success', [['samples', 'val']])"


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


@pytest.mark.parametrize("argument", ["gradient_clip_val=1.0", "accumulate_grad_batches=4"])
def test_steps_by_hand_are_not_helped_without_a_word(notebook: Notebook, argument: str) -> None:
    notebook("class Hand(Net):\n    automatic_optimization = False")
    said = notebook.fails(f"trainer({argument}).fit(Hand(), data)").evalue
    assert f"Trainer({argument.partition('=')[0]}=…), and Hand steps by hand" in said


def test_steps_are_planned_only_while_a_fit_is_prepared(notebook: Notebook) -> None:
    assert "known while fit runs" in notebook.fails("trainer().estimated_stepping_batches").evalue
    assert notebook("trainer().num_training_batches, trainer(devices=2).world_size").value == "(inf, 2)"
