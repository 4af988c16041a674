"""What people who know Lightning's Trainer take for granted: modes of frozen layers, hooks and what they are given,
when a schedule steps, what a step is, where a fit goes on that was stopped. Numbers are those that Lightning gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook
from tests.support.trainer import trained

pytestmark = pytest.mark.thorough

START = """
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

class Slow(Net):
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


def stopped(notebook: Notebook, kernel: Kernel, place: str, fit: str = "t.fit(net, loader, held_out)") -> None:
    running = kernel.start(fit)
    kernel.wait_for(lambda: place in running.text)
    kernel.interrupt()
    kernel.wait(running)
    assert running.error is not None
    assert running.error.ename == "KeyboardInterrupt"


PLACES = ("__init__", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")


@pytest.mark.sample("ddp", "fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
@pytest.mark.parametrize("place", PLACES)
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


@pytest.mark.sample("ddp", "fsdp")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "single"])
@pytest.mark.parametrize("place", ["batch 0 1", "batch 1 2", "validation 1 1"])
def test_a_fit_that_was_stopped_goes_on_where_it_was(
    notebook: Notebook, kernel: Kernel, strategy: str, place: str
) -> None:
    devices = 1 if strategy == "single" else 2
    made = f"trainer(strategy={strategy!r}, devices={devices}, max_epochs=3, num_sanity_val_steps=0)"
    notebook(f"torch.manual_seed(7); whole = Slow(); {made}.fit(whole, shuffled(), held_out)", 120)
    notebook(f"torch.manual_seed(7); net = Slow(); net.pause = True; loader = shuffled(); t = {made}")
    stopped(notebook, kernel, place)
    assert notebook("t.interrupted").value == "True"
    notebook("net.pause = False; t.fit(net, loader, held_out)", 120)
    steps = 3 * 64 // (8 * devices)
    assert notebook("t.current_epoch, t.global_step, t.interrupted").value == f"(3, {steps}, False)"
    assert notebook("alike(net, whole)").value == "True"
    assert notebook("net.seen == whole.seen").value == "True"


def test_another_loader_after_a_stop_begins_its_epoch(notebook: Notebook, kernel: Kernel) -> None:
    notebook("net = Slow(); net.pause = True; loader = data; t = trainer(max_epochs=1)")
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
    def on_save_checkpoint(self, trainer, module, checkpoint): checkpoint["mine"] = len(self.losses)
    def on_load_checkpoint(self, trainer, module, checkpoint): self.loaded = checkpoint["mine"]
    def on_exception(self, trainer, module, error): print("raised", type(error).__name__, flush=True)
class Ends(Net):
    def training_epoch_end(self, outputs): self.outputs = [sorted(one) for one in outputs]
    def on_save_checkpoint(self, checkpoint): self.saved = getattr(self, "saved", 0) + 1
given, net = Given(), Ends(); t = trainer(max_epochs=1, callbacks=given); t.fit(net, data)
other, again = Given(), Ends(); u = trainer(max_epochs=1, callbacks=other)
u.fit(again, data, ckpt_path=t.checkpoint_callback.last_model_path)""")
    assert notebook("len(given.losses), net.outputs == [['loss']] * 4, net.saved, other.loaded").value == (
        "(4, True, 1, 4)"
    )
    assert notebook("getattr(again, 'saved', 0)").value == "0", "a checkpoint that is read is not saved"
    raising = "class Raises(Net):\n    def training_step(self, batch, batch_idx): raise ValueError('on purpose')"
    failing = notebook.kernel.run(f"{raising}\ntrainer(callbacks=Given()).fit(Raises(), data)")
    assert failing.error is not None
    assert "raised ValueError" in failing.text


@pytest.mark.parametrize("strategy", ["ddp", "dp", "zero1"])
def test_lbfgs_computes_the_loss_as_often_as_it_likes(notebook: Notebook, strategy: str) -> None:
    notebook("""
class Second(Net):
    def configure_optimizers(self): return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)
def alone(size):
    net = Second(); optimizer = net.configure_optimizers()
    for at in range(0, 64, size):
        def closure():
            optimizer.zero_grad(); loss = F.cross_entropy(net(X[at:at + size]), Y[at:at + size]); loss.backward()
            return loss
        optimizer.step(closure)
    return net""")
    size = 8 if strategy == "dp" else 16
    notebook(f"net = Second(); trainer(strategy={strategy!r}, max_epochs=1).fit(net, data)", 60)
    apart = f"max((p - q).abs().max().item() for p, q in zip(net.parameters(), alone({size}).parameters()))"
    assert float(notebook(apart).value) < 1e-3, "LBFGS makes much of the last digits"
    notebook("""
class Norms(Second):
    norms = ()
    def on_before_optimizer_step(self, optimizer): self.norms = (*self.norms, float(self.layers[0].weight.grad.norm()))
norms = Norms(); trainer(max_epochs=1).fit(norms, data)""")
    assert notebook("len(norms.norms) >= 4 and all(norms.norms)").value == "True", "there are gradients"
    said = notebook.fails("trainer(accumulate_grad_batches=2).fit(Second(), data)").evalue
    assert "accumulate_grad_batches is made for optimizers that take one gradient" in said


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
