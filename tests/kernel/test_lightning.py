"""Lightning's own Trainer, `strategy="nbtrain_ddp"`, from ordinary cells: it trains as one process does on the same
samples, and what it did is in the notebook's own objects."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.absent import absent
from tests.support.kernels import Kernel, running_kernel
from tests.support.machines import notebook_with_machines
from tests.support.notebook import Notebook

START = """
%load_ext nbtrain
import logging, time, warnings
import lightning as L, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.seen, self.at = [], ""
    def training_step(self, batch, i):
        if self.at == "raise" and self.global_step == 2 and self.global_rank == 1:
            raise ValueError("on purpose")
        if self.at == "slow":
            print("at batch", i)
            time.sleep(0.3)
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        self.seen.append(i)
        self.log("loss", loss)
        return loss
    def validation_step(self, batch, i):
        self.log("val", F.cross_entropy(self.layers(batch[0]), batch[1]))
    test_step = validation_step
    def predict_step(self, batch, i, dataloader_idx=0):
        return self.layers(batch[0])
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

torch.manual_seed(0)
X = torch.randn(64, 4); Y = (X[:, 0] > 0).long()
data = DataLoader(TensorDataset(X, Y), 8)
uneven = DataLoader(TensorDataset(torch.randn(70, 4)), 8)

def trainer(**given):
    usual = dict(accelerator="cpu", devices=2, strategy="nbtrain_ddp", max_epochs=2, default_root_dir=ROOT,
                 enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1)
    return L.Trainer(**{**usual, **given})

def one_process(epochs, net=None, size=16, then=None):
    "The loop that a user would have written, on batches of two ranks' samples. `then`: their size after an epoch."
    net = net or Net()
    (optimizer,), (scheduler,) = net.configure_optimizers()
    for epoch in range(epochs):
        size = then if epoch and then else size
        for at in range(0, 64, size):
            optimizer.zero_grad()
            F.cross_entropy(net.layers(X[at:at + size]), Y[at:at + size]).backward()
            optimizer.step()
        scheduler.step()
    return net

def alike(a, b):
    return all(torch.allclose(p, q, atol=1e-6) for p, q in zip(a.parameters(), b.parameters()))
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with running_kernel(NBTRAIN_HISTORY=str(tmp_path_factory.mktemp("history"))) as kernel:
        found = kernel.run("try: import lightning\nexcept ImportError: print('absent')", 120)
        if "absent" in found.text:
            absent("Lightning is not installed", "pip install nbtrain[lightning]")
        kernel.run(f"ROOT = {str(tmp_path_factory.mktemp('lightning'))!r}")
        assert kernel.run(START, 120).error is None
        yield kernel


@pytest.fixture
def notebook(kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(kernel, "")
    yield made
    made("%distributed stop")


def test_fit_trains_as_one_process_and_everything_comes_home(notebook: Notebook) -> None:
    notebook("net = Net(); t = trainer(); t.fit(net, data, data)")
    assert notebook("alike(net, one_process(2))").value == "True"
    assert notebook("t.global_step, t.current_epoch, t.state.finished").value == "(8, 2, True)"
    assert notebook("net.seen").value == "[0, 1, 2, 3, 0, 1, 2, 3]", "the module's own attributes"
    assert notebook("sorted(t.callback_metrics) == sorted(t.logged_metrics) == ['loss', 'val']").value == "True"
    shown = notebook("F.cross_entropy(net.layers(X), Y).isclose(t.callback_metrics['val'], atol=1e-5).item()")
    assert shown.value == "True", "of all samples, on every rank"
    assert notebook("t.lr_scheduler_configs[0].scheduler.get_last_lr()").value == "[0.05]"
    assert notebook("'momentum_buffer' in t.optimizers[0].state[net.layers[0].weight]").value == "True"
    assert notebook("type(net.layers).__name__, net.trainer is t").value == "('Sequential', True)"


def test_fit_is_handed_over_and_the_module_comes_home(notebook: Notebook) -> None:
    notebook("import os; os.environ['NBTRAIN_RUNS'] = ROOT + '/runs'; import nbtrain")
    notebook("net = Net(); weights = list(net.parameters())")
    notebook("t = trainer(strategy=nbtrain.lightning.Strategy('ddp --detach')); t.fit(net, data)")
    assert notebook("t.state.finished, t.global_step").value == "(False, 0)", "it has only begun"
    assert "net: in place" in notebook("%distributed attach").stdout
    same = "alike(net, one_process(2)), net.layers[0].weight is weights[0]"
    assert notebook(f"{same}, nbtrain.detached().values['t'].global_step").value == "(True, True, 8)"
    assert "test returns what it has computed" in notebook.fails("t.test(net, data)").evalue


def test_what_the_module_logs_is_drawn_in_place_of_bars(notebook: Notebook) -> None:
    notebook("t = trainer(enable_progress_bar=True); bar = t.progress_bar_callback")
    shown = notebook("t.fit(Net(), data, data)").text
    assert "\x1b[1A" not in shown
    assert "it/s" not in shown
    assert notebook("t.progress_bar_callback is bar, len(t.callbacks)").value == "(True, 2)"
    assert notebook("import nbtrain; nbtrain.history()[-1].names()").value == "['loss', 'val']"


STRATEGIES = (
    "zero1", "sharded", "fsdp", "fsdp_cpu_offload", "deepspeed_stage_3", "horovod", "dp", "ddp2", "pipeline",
    "sequential",
)  # fmt: skip


@pytest.mark.sample("fsdp", "pipeline")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_train_as_one_process(notebook: Notebook, strategy: str) -> None:
    for package in ("deepspeed", "horovod"):
        if package in strategy and not find_spec(package):
            absent(f"{package} is not installed", f"pip install {package}")
    # Under these the ranks share each batch; otherwise each has one of its own.
    size = 8 if strategy in ("dp", "ddp2", "pipeline", "sequential") else 16
    notebook(f"net = Net(); t = trainer(strategy='nbtrain_{strategy}'); t.fit(net, data, data)")
    assert notebook(f"alike(net, one_process(2, size={size}))").value == "True"
    assert notebook(f"t.global_step, net.seen == [*range(64 // {size})] * 2").value == f"({128 // size}, True)"
    shown = notebook("F.cross_entropy(net.layers(X), Y).isclose(t.callback_metrics['val'], atol=1e-5).item()")
    assert shown.value == "True", "of all samples, each once"
    notebook("saved = torch.load(t.checkpoint_callback.best_model_path, weights_only=False)")
    shown = "all(torch.equal(saved['state_dict'][name], value) for name, value in net.state_dict().items())"
    assert notebook(shown).value == "True", "a checkpoint holds whole weights"
    notebook("other = Net(); half = trainer(strategy='nbtrain_" + strategy + "', max_epochs=1); half.fit(other, data)")
    notebook(
        "new = Net(); goes_on = trainer(); goes_on.fit(new, data, ckpt_path=half.checkpoint_callback.best_model_path)"
    )
    assert notebook(f"alike(new, one_process(2, size={size}, then=16))").value == "True", "under another strategy"
    assert "stays on the ranks" not in notebook("predicted = t.predict(net, uneven)").text
    alone = "torch.cat([net.layers(batch[0]) for batch in uneven])"
    assert notebook(f"torch.allclose(torch.cat(predicted), {alone}, atol=1e-6)").value == "True"


MODULES = {
    "a forward that the step calls": """
class Calls(Net):
    def forward(self, x): return self.layers(x)
    def training_step(self, batch, i): return F.cross_entropy(self(batch[0]), batch[1])""",
    "a forward, and a step that calls the part": """
class Calls(Net):
    def forward(self, x): return self.layers(x)""",
    "two parts, in a method of its own": """
class Calls(Net):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.back = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    def forward(self, x): return self.layers(x)
    def both(self, x): return F.mse_loss(self.back(self.layers(x)), x)
    def training_step(self, batch, i): return self.both(batch[0])
    def validation_step(self, batch, i): self.log("val", self.both(batch[0]))""",
}
BY_HAND = """
alone = Calls(); alone.log = lambda *given: None
(optimizer,), (scheduler,) = alone.configure_optimizers()
for _ in range(2):
    for batch in data:
        optimizer.zero_grad(); alone.training_step(batch, 0).backward(); optimizer.step()
    scheduler.step()
"""


@pytest.mark.parametrize("strategy", ["dp", "ddp2", "pipeline"])
@pytest.mark.parametrize("case", MODULES)
def test_the_model_that_a_step_calls_is_the_one_that_is_divided(notebook: Notebook, case: str, strategy: str) -> None:
    notebook(MODULES[case] + BY_HAND)
    said = notebook(f"net = Calls(); t = trainer(strategy='nbtrain_{strategy}'); t.fit(net, data, data)").text
    assert notebook("alike(net, alone)").value == "True"
    assert ("Sequential in 2 stages" if strategy == "pipeline" else "each batch is cut over") in said
    assert "is called with whole batches" not in said


def test_a_module_that_pipeline_cannot_cut_gets_a_sentence(notebook: Notebook) -> None:
    error = notebook.fails("trainer(strategy='nbtrain_pipeline', devices=4).fit(Net(), data)")
    assert "Sequential has 3 parts to be divided among the 4 stages" in error.evalue
    assert "--strategy fsdp" in error.evalue


def test_fit_test_fit_and_predict_in_one_trainer(notebook: Notebook) -> None:
    notebook("net = Net(); t = trainer(max_epochs=1); t.fit(net, data)")
    notebook("tested = t.test(net, data, verbose=False)")
    assert notebook("round(tested[0]['val'] - F.cross_entropy(net.layers(X), Y).item(), 4)").value in ("0.0", "-0.0")
    notebook("t.fit_loop.max_epochs = 2; t.fit(net, data)")
    assert notebook("alike(net, one_process(1, one_process(1)))").value == "True"
    notebook("predicted = t.predict(net, data)")
    assert notebook("torch.allclose(torch.cat(predicted), net.layers(X), atol=1e-6)").value == "True"
    assert notebook("t.global_step, t.current_epoch").value == "(8, 2)"


COUNTS = """
import torchmetrics
class Counts(Net):
    def __init__(self):
        super().__init__()
        self.matrix = torchmetrics.ConfusionMatrix("multiclass", num_classes=2)
        self.trained = torchmetrics.SumMetric()
    def training_step(self, batch, i):
        self.trained.update(len(batch[0]))
        return super().training_step(batch, i)
    def validation_step(self, batch, i):
        self.matrix.update(self.layers(batch[0]), batch[1])
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
        assert len(self.all_gather(batch[1])) == len(batch[1])
    test_step = validation_step
    def on_validation_epoch_end(self):
        self.counted = self.matrix.compute(); self.matrix.reset()
    def on_train_epoch_end(self):
        self.steps_saw = self.trained.compute(); self.trained.reset()
counts = Counts()
"""
SUMS = """
class Sums(Net):
    def __init__(self):
        super().__init__()
        self.trained = torchmetrics.SumMetric()
    def training_step(self, batch, i):
        self.trained.update(len(batch[0]))
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True, on_epoch=True, on_step=False)
        self.gathered = self.all_gather(batch[1]).numel()
        return super().training_step(batch, i)
    def on_train_epoch_end(self):
        self.steps_saw = self.trained.compute(); self.trained.reset()
"""


@pytest.mark.parametrize("strategy", ["ddp", "dp", "ddp2", "pipeline"])
def test_what_a_training_counts_is_counted_once(notebook: Notebook, strategy: str) -> None:
    notebook("import torchmetrics" + SUMS)
    notebook(f"net = Sums(); t = trainer(strategy='nbtrain_{strategy}'); t.fit(net, data)")
    shown = notebook("float(t.callback_metrics['samples']), int(net.steps_saw), net.gathered")
    assert shown.value == f"(64.0, 64, {16 if strategy == 'ddp' else 8})"


def test_what_an_evaluation_counts_is_counted_once(notebook: Notebook) -> None:
    notebook(COUNTS + "t = trainer(); t.fit(counts, data, data)")
    assert notebook("int(counts.counted.sum()), int(counts.steps_saw)").value == "(64, 64)", "of all ranks, each once"
    assert notebook("float(t.callback_metrics['samples'])").value == "64.0"
    assert notebook("t.test(counts, data, verbose=False)").value == "[{'samples': 64.0}]"
    assert notebook("counts.matrix.distributed_available_fn.__module__.partition('.')[0]").value == "'torchmetrics'"
    notebook("""
class Shares(Counts):
    def val_dataloader(self):
        share = DistributedSampler(data.dataset, self.trainer.world_size, self.global_rank, shuffle=False)
        return DataLoader(data.dataset, 8, sampler=share)
    def validation_step(self, batch, i):
        self.matrix.update(self.layers(batch[0]), batch[1])
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
counts = Shares(); t = trainer(); t.fit(counts, data)
""")
    shown = notebook("int(counts.counted.sum()), float(t.callback_metrics['samples'])")
    assert shown.value == "(64, 64.0)", "shares of one's own are added up"


@pytest.mark.parametrize(
    ("given", "limit", "sizes"),
    [
        ("uneven", "None", [8] * 8 + [6]),
        ("uneven", "3", [8] * 3),
        ("uneven", "1", [8]),
        ("uneven", "0.5", [8] * 4),
        ("DataLoader(TensorDataset(X), 8, shuffle=True)", "None", [8] * 8),
        ("DataLoader(TensorDataset(X), 64)", "None", [64]),
    ],
)
def test_predict_is_whole_and_in_order(notebook: Notebook, given: str, limit: str, sizes: list[int]) -> None:
    notebook(f"net = Net(); loader = {given}; t = trainer(limit_predict_batches={limit})")
    notebook("predicted = t.predict(net, loader)")
    assert notebook("[len(batch) for batch in predicted]").value == str(sizes)
    if "shuffle" not in given:
        whole = "torch.cat([net.layers(batch[0]) for batch in loader])[:sum(map(len, predicted))]"
        assert notebook(f"torch.allclose(torch.cat(predicted), {whole})").value == "True"
    else:
        key = "torch.cat({}).sum(1).sort().values"
        same = f"torch.allclose({key.format('predicted')}, {key.format('[net.layers(X)]')}, atol=1e-6)"
        assert notebook(same).value == "True"
    assert notebook(f"t.limit_predict_batches == {1.0 if limit == 'None' else limit}").value == "True"


def test_callbacks_have_in_the_notebook_what_they_saw(notebook: Notebook) -> None:
    notebook("stop = EarlyStopping('val', patience=1, min_delta=10.0); best = ModelCheckpoint(monitor='val')")
    notebook("t = trainer(callbacks=[stop, best], max_epochs=9); t.fit(Net(), data, data)")
    assert notebook("stop.stopped_epoch, t.current_epoch").value == "(1, 2)"
    assert notebook("import os; os.path.exists(best.best_model_path), best.best_model_score.ndim").value == "(True, 0)"
    notebook("again = Net.load_from_checkpoint(best.best_model_path)")
    assert notebook("len(t.validate(again, data, verbose=False, ckpt_path=best.best_model_path))").value == "1"


def test_an_error_of_a_rank_is_the_cells_and_the_next_fit_is_right(notebook: Notebook) -> None:
    notebook("net = Net(); net.at = 'raise'; t = trainer()")
    error = notebook.fails("t.fit(net, data)")
    assert (error.ename, error.evalue) == ("ValueError", "on purpose")
    assert "raised on rank 1" in "".join(error.traceback)
    assert notebook("t.interrupted, alike(net, Net())").value == "(True, True)"
    notebook("net.at = ''; net.seen.clear(); trainer().fit(net, data)")
    assert notebook("alike(net, one_process(2))").value == "True"


def test_stop_brings_home_what_was_trained(kernel: Kernel, notebook: Notebook) -> None:
    notebook("net = Net(); net.at = 'slow'; t = trainer(max_epochs=20)")
    running = kernel.start("t.fit(net, data)")
    kernel.wait_for(lambda: "at batch 2" in running.text)
    kernel.interrupt()
    kernel.wait(running)
    assert running.error is not None
    assert "KeyboardInterrupt" in "".join(running.error.traceback)
    steps = int(notebook("t.global_step").value or 0)
    assert 0 < steps < 80
    assert notebook(f"len(net.seen) - {steps} in (0, 1), alike(net, Net())").value == "(True, False)"
    notebook("net.at = ''; trainer().fit(net, data)")


def test_options_of_a_strategy(notebook: Notebook) -> None:
    notebook("import nbtrain; own = nbtrain.lightning.Strategy('ddp --bucket-mb 1')")
    notebook("net = Net(); trainer(strategy=own).fit(net, data)")
    assert notebook("alike(net, one_process(2))").value == "True"
    assert "fsdp" in notebook.fails("trainer(strategy=nbtrain.lightning.Strategy('fdsp')).fit(net, data)").evalue


def test_in_a_cell_of_the_ranks_lightning_does_it_all(notebook: Notebook) -> None:
    notebook(
        "%%distributed -s none -d 2 --accelerator cpu\nmade = Net(); t = trainer(strategy='ddp'); t.fit(made, data)"
    )
    assert notebook("alike(made, Net())").value == "False"
    own = "%%distributed -s none -d 2 --accelerator cpu\nfrom nbtrain.annexes.frameworks.lightning import Strategy\n"
    assert "write Lightning's own" in notebook(own + "trainer(strategy=Strategy('ddp'))").text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("strategy='nbtrain_xla'", "in a cell below %%distributed -s none"),
        ("num_nodes=2", "%distributed --engine ssh --hosts a,b"),
    ],
)
def test_what_cannot_be_done_is_refused_when_the_trainer_is_made(notebook: Notebook, given: str, said: str) -> None:
    error = notebook.fails(f"trainer({given})")
    assert error.ename == "NotSupported"
    assert said in error.evalue


CONTRAST = """
class Contrast(Net):
    def forward(self, x): return self.layers(x)
    def training_step(self, batch, i):
        out = self(batch[0])
        if GATHERS: out = self.all_gather(out, sync_grads=True).flatten(0, 1)
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))
def contrast_alone(size):
    net = Net(); (optimizer,), (scheduler,) = net.configure_optimizers()
    for _ in range(2):
        for at in range(0, 64, size):
            out = net.layers(X[at:at + size]); optimizer.zero_grad()
            F.cross_entropy(out @ out.T, torch.arange(len(out))).backward(); optimizer.step()
        scheduler.step()
    return net
"""


@pytest.mark.thorough
def test_a_trainer_on_several_machines(tmp_path: Path) -> None:
    with notebook_with_machines() as (notebook, machines):
        notebook(f"ROOT = {str(tmp_path)!r}")
        notebook(START, 120)
        notebook.kernel.wait_for(lambda: machines.joined() == 2)
        notebook("%distributed --engine elastic --nodes 2")
        for strategy, devices in (("ddp", 1), ("ddp2", 2)):
            made = f"trainer(strategy='nbtrain_{strategy}', num_nodes=2, devices={devices})"
            notebook(f"net = Net(); t = {made}; t.fit(net, data, data)", 120)
            assert notebook("alike(net, one_process(2)), t.global_step").value == "(True, 8)"
            shown = notebook("F.cross_entropy(net.layers(X), Y).isclose(t.callback_metrics['val'], atol=1e-5).item()")
            assert shown.value == "True"
            notebook("predicted = t.predict(net, uneven)")
            alone = "torch.cat([net.layers(batch[0]) for batch in uneven])"
            assert notebook(f"torch.allclose(torch.cat(predicted), {alone}, atol=1e-6)").value == "True"
        notebook("import torchmetrics" + SUMS)
        notebook(f"net = Sums(); t = {made}; t.fit(net, data)")
        shown = notebook("float(t.callback_metrics['samples']), int(net.steps_saw), net.gathered")
        assert shown.value == "(64.0, 64, 16)", "one rank of a node speaks for all of them"
        notebook(f"{CONTRAST}\nGATHERS = True\nnet = Contrast(); {made}.fit(net, data)")
        assert notebook("alike(net, contrast_alone(16))").value == "True"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "dp", "ddp2", "pipeline"])
def test_a_loss_of_the_whole_batch(notebook: Notebook, strategy: str) -> None:
    """What `training_step_end` was for."""
    size = 16 if strategy in ("ddp", "fsdp") else 8
    notebook(f"{CONTRAST}\nGATHERS = {size == 16}")
    notebook(f"net = Contrast(); trainer(strategy='nbtrain_{strategy}').fit(net, data)")
    assert notebook(f"alike(net, contrast_alone({size}))").value == "True"


def test_a_fit_is_not_exported_and_the_line_for_a_script_is_named(notebook: Notebook) -> None:
    notebook("trainer(max_epochs=1).fit(Net(), data)")
    assert "as strategy='ddp' in the place of 'nbtrain_ddp'" in notebook.fails("%distributed export train.py").evalue


# --- Lightning's own examples, as they are published ---------------------------

EXAMPLES = """
import os
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.demos.transformer import LightningTransformer, WikiText2
os.chdir(ROOT); os.makedirs("data", exist_ok=True)
torch.manual_seed(3)
words = [f"word{number}" for number in torch.randint(0, 40, (1500,)).tolist()]
with open("data/wikitext-2.txt", "w") as file:  # it is there, so nothing is downloaded
    file.write("\\n".join(" ".join(words[at:at + 15]) for at in range(0, 1500, 15)))

MADE = {
    "boring": BoringModel, "manual": ManualOptimBoringModel,
    # Adam makes a step of what two orders of one sum leave of a gradient that is zero: less so in float64.
    "transformer": lambda: LightningTransformer(vocab_size=41).double(),
}
def make(name):
    torch.manual_seed(5)
    model = MADE[name]()
    for one in model.modules():  # what is drawn by two ranks is not what one process draws
        if isinstance(one, torch.nn.Dropout): one.p = 0.0
        if isinstance(one, torch.nn.MultiheadAttention): one.dropout = 0.0
    return model

def shortly(strategy, ranks=2):
    return L.Trainer(strategy=f"nbtrain_{strategy}", accelerator="cpu", devices=ranks, max_epochs=1, logger=False,
                     limit_train_batches=4, limit_val_batches=2, enable_checkpointing=False, default_root_dir=ROOT)

def example_alone(name):
    "Lightning itself, on batches of two ranks' samples."
    model = make(name)
    dataset = model.train_dataloader().dataset
    loader = DataLoader(dataset, 2 * model.train_dataloader().batch_size)
    L.Trainer(accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=4, limit_val_batches=2, logger=False,
              enable_checkpointing=False, enable_progress_bar=False).fit(model, loader)
    return model
"""


@pytest.fixture(scope="module")
def examples_made(kernel: Kernel) -> None:
    assert kernel.run(EXAMPLES, 120).error is None


@pytest.fixture
def examples(examples_made: None, notebook: Notebook) -> Notebook:
    return notebook


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("boring", "ddp"), ("manual", "ddp"), ("manual", "fsdp"), ("transformer", "fsdp"), ("transformer", "ddp")],
)
def test_an_example_trains_as_lightning_does_in_one_process(examples: Notebook, name: str, strategy: str) -> None:
    examples(f"net = make({name!r}); shortly({strategy!r}).fit(net); other = example_alone({name!r})", 120)
    assert examples(
        "all(torch.allclose(p, q, atol=5e-5) for p, q in zip(net.parameters(), other.parameters()))"
    ).value == ("True")
    started = f"all(torch.equal(p, q) for p, q in zip(net.parameters(), make({name!r}).parameters()))"
    assert examples(started).value == "False", "it has trained"
