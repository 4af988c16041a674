"""`nbtrain.Trainer` from ordinary cells: it trains as one process does on the same samples, under every strategy, and
what it did is in the notebook's own objects."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain import registry
from tests.support.absent import absent
from tests.support.kernels import Kernel
from tests.support.notebook import Notebook
from tests.support.trainer import trained


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with trained(tmp_path_factory) as kernel:
        yield kernel


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(kernel, "")
    yield made
    made("%distributed stop")


STRATEGIES = ("ddp", "dp", "zero1", "fsdp", "deepspeed --stage 3", "pipeline")


@pytest.mark.sample("ddp", "fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fit_test_fit_predict_equal_one_process(notebook: Notebook, strategy: str) -> None:
    for package in registry.strategy(strategy.partition(" ")[0]).needs.packages:
        if find_spec(package) is None:
            absent(f"{package} is not installed", f"pip install {package}")
    # Under dp and pipeline the ranks share each batch; otherwise each has one of its own.
    size = 8 if strategy in ("dp", "pipeline") else 16
    notebook(f"net = Net(); t = trainer(strategy={strategy!r}, max_epochs=1); t.fit(net, data, held_out)", 120)
    assert notebook(f"alike(net, one_process(1, size={size}))").value == "True"
    shown = notebook("F.cross_entropy(net(X[:30]), Y[:30]).isclose(t.callback_metrics['val'], atol=1e-5).item()")
    assert shown.value == "True", "of all samples, the last batch being smaller"
    assert notebook("t.test(net, held_out, verbose=False)[0]['samples']").value == "30.0"
    notebook("t.max_epochs = 3; t.fit(net, data, held_out)", 120)
    assert notebook(f"alike(net, one_process(3, size={size}))").value == "True", "the second fit has gone on"
    assert notebook("t.current_epoch, t.global_step == 3 * 64 // " + str(size)).value == "(3, True)"
    found = "t.predict(net, DataLoader(TensorDataset(X[:37]), 8))"
    assert notebook(f"found = {found}; [one['index'] for one in found]", 60).value == "[0, 1, 2, 3, 4]"
    assert notebook("torch.allclose(torch.cat([one['out'] for one in found]), net(X[:37]), atol=1e-5)").value == "True"
    assert notebook("type(net).__name__, type(net.layers).__name__, 'trainer' in net.__dict__").value == (
        "('Net', 'Sequential', False)"
    )


def test_the_loop_that_was_written_is_what_a_user_would_write(notebook: Notebook) -> None:
    notebook("net = Net(); t = trainer(max_epochs=1, enable_checkpointing=False); t.fit(net, data)")
    shown = notebook("print(t.loop())").stdout
    assert (
        shown.strip()
        == """\
def trainer_fit(trainer, module, optimizer, schedulers, train_loader):
    trainer.begin_fit()
    trainer.begin_training()
    for epoch in resumable(range(trainer.first_epoch, trainer.last_epoch)):
        trainer.begin_epoch(epoch)
        for batch_idx, batch in trainer.batches(train_loader):
            loss = trainer.loss_of(module.training_step(batch, batch_idx))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trainer.end_batch()
        schedulers[0].step()
        trainer.end_epoch()
        trainer.checkpoint()
        if trainer.stops:
            break
    optimizer.zero_grad()
    trainer.end_training()"""
    )
    assert notebook("[name for name in ('trainer_fit', 'given') if name in globals()]").value == "[]"


def test_logged_values_are_those_of_all_samples_of_all_ranks(notebook: Notebook) -> None:
    notebook("""
class Logs(Net):
    def training_step(self, batch, i):
        self.log("mean", batch[0].mean(), on_step=False, on_epoch=True)
        self.log("most", batch[0].max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("count", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, i)
net = Logs(); t = trainer(max_epochs=1, callbacks=[LearningRateMonitor()])
t.fit(net, data)
""")
    assert notebook("t.callback_metrics['mean'].isclose(X.mean(), atol=1e-6).item()").value == "True"
    assert notebook(
        "t.callback_metrics['most'].item() == X.max().item(), t.callback_metrics['count'].item()"
    ).value == ("(True, 64.0)")
    assert notebook("t.callback_metrics['lr-SGD'].item()").value.startswith("0.2")
    assert notebook("sorted(nbtrain.history()[-1].metrics)").value.count("loss") == 2, "loss_step, loss_epoch"


OBJECTS = {
    "classes": "strategies.FSDPStrategy(auto_wrap_policy={nn.Linear})",
    "a policy": "strategies.FSDPStrategy(auto_wrap_policy=functools.partial(by_size, min_num_params=20))",
    "a config": "strategies.DeepSpeedStrategy(config={'zero_optimization': {'stage': 2}})",
    "Lightning's fsdp": "theirs.FSDPStrategy(sharding_strategy='SHARD_GRAD_OP')",
    "Lightning's deepspeed": "theirs.DeepSpeedStrategy(stage=2)",
}


@pytest.mark.sample("classes")
@pytest.mark.parametrize("case", OBJECTS)
def test_objects_for_strategies(notebook: Notebook, case: str) -> None:
    for package in ["deepspeed"] * ("config" in case or "deepspeed" in case) + ["lightning"] * ("Lightning" in case):
        if find_spec(package) is None:
            absent(f"{package} is not installed", f"pip install {package}")
    imports = "import functools\nfrom nbtrain.trainer import strategies\n"
    imports += "from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as by_size\n"
    imports += "import lightning.pytorch.strategies as theirs\n" * ("Lightning" in case)
    notebook(f"{imports}net = Net(); trainer(strategy={OBJECTS[case]}).fit(net, data)", 120)
    assert notebook("alike(net, one_process(2))").value == "True"


FORMS = {
    "an optimizer": "sgd",
    "a list": "[sgd]",
    "lists of both": "[sgd], [step]",
    "a dict": "{'optimizer': sgd, 'lr_scheduler': step}",
    "a dict of dicts": "{'optimizer': sgd, 'lr_scheduler': {'scheduler': step, 'interval': 'step', 'frequency': 2}}",
    "a frequency beyond the epoch": "{'optimizer': sgd, 'lr_scheduler': {'scheduler': step, 'interval': 'step', "
    "'frequency': 5}}",
    "a metric beside what needs none": "[sgd], [{'scheduler': step, 'monitor': 'val'}]",
    "a plateau": "{'optimizer': sgd, 'lr_scheduler': {'scheduler': plateau, 'monitor': 'val'}}",
    "a plateau, the older way": "{'optimizer': sgd, 'lr_scheduler': plateau, 'monitor': 'val'}",
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_configure_optimizers(notebook: Notebook, form: str) -> None:
    notebook(f"""
class Forms(Net):
    def configure_optimizers(self):
        sgd = torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)
        step = torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, patience=0, threshold=10.0)
        return {FORMS[form]}
net = Forms(); t = trainer(); t.fit(net, data, held_out)
""")
    rates = {
        "lists of both": 0.05,
        "a dict": 0.05,
        "a dict of dicts": 0.2 / 16,
        "a plateau": 0.002,
        "a plateau, the older way": 0.002,
        "a metric beside what needs none": 0.05,
    }
    assert float(notebook("t.optimizers[0].param_groups[0]['lr']").value) == pytest.approx(rates.get(form, 0.2))


def test_several_optimizers_by_hand_and_in_turn(notebook: Notebook) -> None:
    notebook("""
class ByHand(Pair):
    automatic_optimization = False
    def training_step(self, batch, batch_idx):
        for which, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad(); self.manual_backward(self.losses(batch[0], which)); optimizer.step()
class InTurn(Pair):
    def training_step(self, batch, batch_idx, optimizer_idx):
        return self.losses(batch[0], optimizer_idx)
alone = pair_alone()
pairs = [ByHand(), InTurn()]
for pair in pairs:
    trainer(max_epochs=1).fit(pair, data)
""")
    assert notebook("[alike(pair, alone) for pair in pairs]").value == "[True, True]"


def test_evaluations_are_whole_whatever_their_steps_call(notebook: Notebook) -> None:
    """`gather` in a step is torch's, and does not mean that ranks have shares."""
    notebook("""
class Gathers(Net):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        picked = self(batch[0]).log_softmax(1).gather(1, batch[1][:, None])
        self.log("val", -picked.mean())
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).gather(1, torch.zeros(len(batch[0]), 1, dtype=torch.long))
net = Gathers(); t = trainer(max_epochs=1); t.fit(net, data, held_out)
found = t.predict(net, data)
""")
    assert notebook(
        "F.cross_entropy(net(X[:30]), Y[:30]).isclose(t.callback_metrics['val'], atol=1e-5).item()"
    ).value == ("True")
    assert notebook("torch.allclose(torch.cat(found)[:, 0], net(X)[:, 0], atol=1e-6)").value == "True"
    two = "t.validate(net, [data, held_out], verbose=False)"
    assert notebook(f"[sorted(one) for one in {two}]").value == "[['val/dataloader_idx_0'], ['val/dataloader_idx_1']]"


def test_a_step_end_sees_the_whole_batch(notebook: Notebook) -> None:
    """A loss that is of the whole batch, as of a softmax over its samples."""
    notebook("""
contrast = lambda out, y: F.cross_entropy(out @ out.T, torch.arange(len(out)))
class Whole(Net):
    def training_step(self, batch, batch_idx):
        return {"out": self(batch[0])}
    def training_step_end(self, outputs):
        return contrast(outputs["out"], None)
net = Whole(); trainer().fit(net, data)
# two ranks see every other batch of eight
order = torch.cat([torch.arange(at, at + 16) for at in range(0, 64, 16)])
""")
    assert notebook("alike(net, one_process(2, step=contrast))").value == "True"


def test_accumulation_and_clipping(notebook: Notebook) -> None:
    notebook("""
net = Net()
trainer(max_epochs=1, strategy="fsdp", accumulate_grad_batches=3, gradient_clip_val=0.1).fit(net, data)
alone = Net(); (optimizer,), _ = alone.configure_optimizers()
for group in ([0, 16, 32], [48]):
    optimizer.zero_grad()
    for at in group:
        (F.cross_entropy(alone(X[at:at + 16]), Y[at:at + 16]) / 3).backward()
    nn.utils.clip_grad_norm_(alone.parameters(), 0.1); optimizer.step()
""")
    assert notebook("alike(net, alone)").value == "True"


def test_going_on_in_the_middle_of_an_epoch_under_another_strategy(notebook: Notebook) -> None:
    notebook("""
kept = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
net = Net(); t = trainer(callbacks=[kept]); t.fit(net, data)
other = Net(); again = trainer(strategy="fsdp"); middle = sorted(kept.best_k_models)[0]
again.fit(other, data, ckpt_path=middle)
""")
    assert notebook("os.path.basename(middle), alike(net, other)").value == "('epoch=0-step=3', True)"
    assert notebook("again.current_epoch, again.global_step, other.seen").value == "(2, 8, [3, 0, 1, 2, 3])"


def test_best_and_last_checkpoints_and_early_stopping(notebook: Notebook) -> None:
    notebook("""
stop = EarlyStopping("val", patience=2, min_delta=10.0)
best = ModelCheckpoint(monitor="val", filename="{epoch}-{val:.2f}")
net = Net(); t = trainer(max_epochs=20, callbacks=[stop, best]); t.fit(net, data, held_out)
weights = {name: value.clone() for name, value in net.state_dict().items()}
""")
    assert notebook("t.current_epoch, stop.stopped_epoch, t.should_stop").value == "(3, 2, True)"
    assert notebook(
        "os.listdir(os.path.dirname(best.best_model_path)) == [os.path.basename(best.best_model_path)]"
    ).value == ("True")
    assert notebook(
        "float(best.best_model_score) == t.test(net, held_out, ckpt_path='best', verbose=False)[0]['val']"
    ).value == ("True")
    assert notebook.fails("trainer(callbacks=[EarlyStopping('vall')]).fit(Net(), data, held_out)").evalue.count("'val'")


def test_hooks_and_callbacks_in_their_order(notebook: Notebook) -> None:
    notebook("""
class Says:
    def __init__(self): self.said = []
    def __getattr__(self, name):
        if not name.startswith("on_"): raise AttributeError(name)
        return lambda *args: self.said.append(name)
    def __getstate__(self): return self.__dict__
    def __setstate__(self, state): self.__dict__.update(state)
says = Says()
t = trainer(max_epochs=1, limit_train_batches=1, num_sanity_val_steps=0, callbacks=[says])
t.fit(Net(), data, held_out)
""")
    wanted = [
        "fit_start", "train_start", "train_epoch_start", "train_batch_start", "before_zero_grad", "before_backward",
        "after_backward", "before_optimizer_step", "train_batch_end", "validation_start", "validation_epoch_start",
        *["validation_batch_start", "validation_batch_end"] * 4, "validation_epoch_end", "validation_end",
        "train_epoch_end", "epoch_metrics", "checkpoint", "save_checkpoint", "train_end", "fit_end",
    ]  # fmt: skip
    assert notebook("print(*says.said)").stdout.split()[-len(wanted) :] == [f"on_{name}" for name in wanted]


BAD = {
    "training_step": ("del", "has no training_step: write def training_step(self, batch, batch_idx)"),
    "none": ("return None", "returned nothing: it returns the loss"),
    "detached": ("return (self(batch[0]).sum()).detach()", "has no gradient"),
    "nan": ("return self(batch[0]).sum() * float('nan')", "the loss is NaN in epoch 0, batch 0"),
    "text": ("self.log('loss', 'high'); return self(batch[0]).sum()", "takes a number, a tensor with one element"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_module_gets_one_clear_error(notebook: Notebook, case: str) -> None:
    step, wanted = BAD[case]
    define = f"def training_step(self, batch, batch_idx):\n        {step}" if step != "del" else "pass"
    notebook(f"""
class Bad(nn.Module):
    def __init__(self):
        super().__init__(); self.layers = nn.Linear(4, 2)
    def forward(self, x): return self.layers(x)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
    {define}
""")
    assert wanted in notebook.fails("trainer().fit(Bad(), data)").evalue


def test_bad_data_and_optimizers(notebook: Notebook) -> None:
    other = "class Other(Net):\n    def configure_optimizers(self): return torch.optim.SGD([nn.Parameter(X)], 0.1)"
    assert "of another model" in notebook.fails(f"{other}\ntrainer().fit(Other(), data)").evalue
    every = "return {'optimizer': torch.optim.SGD(self.parameters(), 0.1), 'frequency': 5}"
    other = f"class Other(Net):\n    def configure_optimizers(self): {every}"
    assert "'frequency', which is not there" in notebook.fails(f"{other}\ntrainer().fit(Other(), data)").evalue
    assert "has no data: trainer.fit(module, loader)" in notebook.fails("trainer().fit(Net())").evalue
    shuffled = "trainer(overfit_batches=2).fit(Net(), DataLoader(data.dataset, 8, shuffle=True))"
    assert "the training loader shuffles" in notebook.fails(shuffled).evalue
    empty = "DataLoader(TensorDataset(X[:0]), 8)"
    assert "the training loader is empty" in notebook.fails(f"trainer().fit(Net(), {empty})").evalue
    assert "is called in an ordinary cell" in notebook("%%distributed -d 2\ntrainer().fit(Net(), data)").text


def test_after_an_error_the_next_fit_is_right(notebook: Notebook) -> None:
    notebook("""
class Odd(Net):
    at = ""
    def training_step(self, batch, batch_idx):
        if self.at == "raise" and self.trainer.global_step == 2 and self.trainer.global_rank == 1:
            raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)
net = Odd(); net.at = 'raise'; t = trainer()
""")
    assert notebook.fails("t.fit(net, data)").evalue == "on purpose"
    notebook("net.at = ''; t.fit(net, data)")
    assert notebook("alike(net, one_process(2)), t.current_epoch").value == "(True, 2)"
