"""Fits in this process, as a script has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import nbtrain
from nbtrain.errors import UsageError
from nbtrain.trainer.callbacks import ModelCheckpoint, StochasticWeightAveraging


class Net(nbtrain.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch_idx)
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.head.parameters(), 0.1)


class Validated(Net):
    """`val` is 1 after the first validation, then 2, …; `mean` is of an epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("mean", float(batch_idx), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.number = getattr(self, "number", 0) + 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.number))


def loader(samples: int = 64, **given: Any) -> DataLoader[Any]:
    torch.manual_seed(0)
    x = torch.randn(samples, 4)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), 8, **given)


def trainer(folder: Path, **given: Any) -> Any:
    usual: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "default_root_dir": folder, "enable_progress_bar": False,
    }  # fmt: skip
    return nbtrain.Trainer(**usual | given)


@pytest.mark.parametrize("by_closure", [False, True])
def test_gradients_that_no_optimizer_steps_are_no_part_of_the_norm(tmp_path: Path, by_closure: bool) -> None:
    """Nothing zeroes those of the backbone: they pile up."""

    class Closure(torch.optim.SGD):
        def step(self, closure: Any) -> Any:
            return super().step(closure)

    class Head(Net):
        def configure_optimizers(self) -> Any:
            return (Closure if by_closure else torch.optim.SGD)(self.head.parameters(), 0.1)

    net, alone = Head(), Net()
    trainer(tmp_path, max_epochs=10, gradient_clip_val=0.1).fit(net, loader())
    optimizer = torch.optim.SGD(alone.head.parameters(), 0.1)
    for _ in range(10):
        for x, y in loader():
            optimizer.zero_grad()
            F.cross_entropy(alone.head(alone.backbone(x)), y).backward()
            nn.utils.clip_grad_norm_(alone.head.parameters(), 0.1)
            optimizer.step()
    assert torch.allclose(net.head.weight, alone.head.weight)


def test_a_loss_that_is_not_a_number_is_said_in_bf16_and_left_out_by_the_scaler_of_fp16(tmp_path: Path) -> None:
    class Nan(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * float("nan")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    for precision in (None, "bf16-mixed", "bf16-true", "16-true"):
        with pytest.raises(UsageError, match="the loss is NaN in epoch 0, batch 0"):
            trainer(tmp_path, max_epochs=1, precision=precision).fit(Nan(), loader())
    net = Nan()
    trainer(tmp_path, max_epochs=1, precision="16-mixed").fit(net, loader())
    assert net.seen == list(range(8))
    assert bool(net.head.weight.isfinite().all())


@pytest.mark.parametrize(("given", "every", "saved"), [
    # due at 3 (no value yet), 6, 9 (1.0 of the first epoch), 12, 15
    ({}, 3, ["8-1.0", "9-1.0", "12-1.0", "15-1.0"]),
    ({}, 4, ["8-1.0", "12-1.0", "16-2.0"]),
    ({"val_check_interval": 2}, 2, ["2-1.0", "4-2.0", "6-3.0", "8-4.0", "10-5.0", "12-6.0", "14-7.0", "16-8.0"]),
    ({"val_check_interval": 4}, 3, ["4-1.0", "6-1.0", "9-2.0", "12-3.0", "15-3.0"]),
    ({"max_steps": 12}, 6, ["8-1.0", "12-2.0"]),
])  # fmt: skip
def test_a_checkpoint_every_few_steps_watches_a_metric_of_validations(
    tmp_path: Path, given: dict[str, Any], every: int, saved: list[str]
) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", "{step}-{val}", "val", save_top_k=-1, every_n_train_steps=every,
                           auto_insert_metric_name=False)  # fmt: skip
    usual = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [kept]}
    trainer(tmp_path, **usual | given).fit(Validated(), loader(), loader(16))
    assert sorted((Path(one).name for one in kept.best_k_models), key=lambda name: int(name.split("-")[0])) == saved


def test_a_checkpoint_every_few_steps_says_that_nothing_logs_its_metric(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path, monitor="vall", every_n_train_steps=3)
    with pytest.raises(UsageError, match="ModelCheckpoint watches 'vall', which nothing has logged"):
        trainer(tmp_path, max_epochs=2, callbacks=[kept]).fit(Validated(), loader(), loader(16))


def test_going_on_in_the_middle_of_an_epoch_with_all_its_steps_trains_nothing(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=11, save_top_k=-1)
    whole = Net()
    trainer(tmp_path, max_epochs=3, callbacks=[kept]).fit(whole, loader(shuffle=True))
    net, again = Net(), trainer(tmp_path, max_steps=11, max_epochs=3)
    data = loader(shuffle=True)
    again.fit(net, data, ckpt_path=tmp_path / "kept" / "epoch=1-step=11")
    assert (net.seen, again.global_step, again.current_epoch) == ([], 11, 1)
    again.save_checkpoint(tmp_path / "again")
    again.max_steps = -1
    again.fit(net, data)
    assert (net.seen, again.global_step, again.current_epoch) == ([3, 4, 5, 6, 7, *range(8)], 24, 3)
    assert torch.allclose(net.head.weight, whole.head.weight)
    other, last = Net(), trainer(tmp_path, max_epochs=3)
    last.fit(other, loader(shuffle=True), ckpt_path=tmp_path / "again")
    assert (other.seen, last.global_step, last.current_epoch) == (net.seen, 24, 3)


class Keeps:
    """A callback."""

    def __init__(self, what: Any = None) -> None:
        self.what = what

    def state_dict(self) -> Any:
        return {"what": self.what}

    def load_state_dict(self, state: Any) -> None:
        self.what = state["what"]


class Predicts(Net):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.as_tensor(self.head(self.backbone(batch[0])))


def test_a_checkpoint_holds_classes_which_its_trainer_takes_and_others_have_to_ask_for(tmp_path: Path) -> None:
    made, data, net = trainer(tmp_path, max_epochs=1, callbacks=[Keeps(nn.GELU)]), loader(), Predicts(3)
    made.fit(net, data)
    made.max_epochs = 2
    made.fit(net, data, ckpt_path="last")
    made.save_checkpoint(foreign := tmp_path / "own")
    made.max_epochs = 3
    made.fit(net, data, ckpt_path=foreign)
    assert len(net.seen) == 24
    other = trainer(tmp_path, max_epochs=3, callbacks=[kept := Keeps()])
    with pytest.raises(UsageError, match=r"holds torch\.nn\.modules\.activation\.GELU, .*own', weights_only=False\. "):
        other.fit(Predicts(), data, ckpt_path=foreign)
    other.predict(again := Predicts(), data, ckpt_path=foreign)  # the weights alone
    plain = Predicts.load_from_checkpoint(foreign)
    assert (plain.hparams, torch.equal(again.head.weight, plain.head.weight)) == ({"size": 3}, True)
    other.fit(again, data, ckpt_path=foreign, weights_only=False)
    assert (len(again.seen), other.global_step, kept.what) == (8, 24, nn.GELU)


class Stops(Net):
    """Asks for the end in a batch."""

    at = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.at:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("given", "at", "steps"), [
    ({}, 3, 4),
    ({"min_epochs": 3}, 3, 24),
    ({"min_epochs": 3}, 20, 24),
    ({"min_epochs": 1}, 3, 8),
    ({"min_steps": 12}, 3, 12),
    ({"min_steps": 12, "min_epochs": 2}, 3, 16),
    ({"min_steps": 12, "min_epochs": 1}, 3, 12),
    ({"min_epochs": 2}, 18, 19),
])  # fmt: skip
def test_a_stop_that_was_asked_for_too_early_waits(tmp_path: Path, given: dict[str, Any], at: int, steps: int) -> None:
    net, fitted = Stops(), trainer(tmp_path, max_epochs=5, **given)
    net.at = at
    fitted.fit(net, loader())
    assert (fitted.global_step, len(net.seen), fitted.should_stop) == (steps, steps, True)


@pytest.mark.parametrize(("given", "word"), [
    ({"limit_train_batches": 0.1}, "limit_train_batches=0.1 of the 8 batches is less than one: write .*=0.125 or more"),
    ({"overfit_batches": 0.1}, "overfit_batches=0.1 of the 2 batches .*=0.5 or more, or overfit_batches=1"),
    ({"limit_val_batches": 0.4}, "limit_val_batches=0.4 of the 2 batches is less than one"),
    ({"limit_val_batches": 0.4, "num_sanity_val_steps": 0}, "limit_val_batches=0.4 of the 2 batches"),
])  # fmt: skip
def test_a_part_of_a_loader_that_is_no_batch_is_said(tmp_path: Path, given: dict[str, Any], word: str) -> None:
    net = Validated()
    with pytest.raises(UsageError, match=word):
        trainer(tmp_path, max_epochs=3, **given).fit(net, loader(), loader(16))
    assert not list(tmp_path.glob("**/epoch=*"))


class Averaged(Net):
    """Keeps the weights of each epoch, and is interrupted in a batch."""

    interrupts_at = -1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if len(self.seen) == self.interrupts_at:
            self.interrupts_at = -1
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("by_checkpoint", [False, True])
def test_a_training_with_averaged_weights_goes_on_after_an_interrupt(tmp_path: Path, by_checkpoint: bool) -> None:
    def fitted(net: Net, *more: Any) -> Any:
        averages = StochasticWeightAveraging(0.05, swa_epoch_start=2)
        return trainer(tmp_path, max_epochs=5, callbacks=[averages])

    whole, net = Averaged(), Averaged()
    fitted(whole).fit(whole, loader())
    made, net.interrupts_at = fitted(net), 3 * 8
    with pytest.raises(KeyboardInterrupt):
        made.fit(net, loader())
    assert int(made.averaging.average.n_averaged) == 2
    if by_checkpoint:
        made.save_checkpoint(tmp_path / "c.ckpt")
        net, made = Averaged(), fitted(net)
    made.fit(net, loader(), ckpt_path=tmp_path / "c.ckpt" if by_checkpoint else None)
    assert int(made.averaging.average.n_averaged) == 4
    assert (made.current_epoch, made.global_step) == (5, 40)
    assert torch.allclose(net.head.weight, whole.head.weight)
    made.max_epochs = 7
    with pytest.raises(UsageError, match="the module has its averaged weights"):
        made.fit(net, loader())
    made.save_checkpoint(tmp_path / "ended.ckpt")
    last = fitted(net)
    last.fit(net, loader(), ckpt_path=tmp_path / "ended.ckpt")
    assert torch.allclose(net.head.weight, whole.head.weight)
    more = fitted(net)
    more.max_epochs = 7
    with pytest.raises(UsageError, match="the module has its averaged weights"):
        more.fit(net, loader(), ckpt_path=tmp_path / "ended.ckpt")
    made.fit(net, loader(), ckpt_path=made.checkpoint_callback.last_model_path)  # of its last epoch, without them
    assert (made.current_epoch, made.global_step) == (7, 56)


@pytest.mark.sample(first=8)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("at", [0, 5, 7, 22])
@pytest.mark.parametrize("where", ["step", "backward", "end", "transfer"])
def test_a_batch_that_was_not_finished_is_given_again(tmp_path: Path, group: int, at: int, where: str) -> None:
    class Interrupted(Net):
        calls, interrupts_in = 0, ""

        def at(self, place: str) -> None:
            if place == self.interrupts_in:
                self.calls += 1
                if self.calls == at + 1:
                    raise KeyboardInterrupt

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.at("transfer")
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.at("step")
            return super().training_step(batch, batch_idx)

        def on_after_backward(self) -> None:
            self.at("backward")

        def on_train_batch_end(self, *_: Any) -> None:
            self.at("end")

    def fitted() -> Any:
        return trainer(tmp_path, max_epochs=3, accumulate_grad_batches=group, enable_checkpointing=False)

    whole, net = Interrupted(), Interrupted()
    torch.manual_seed(7)
    fitted().fit(whole, loader(shuffle=True))
    net.interrupts_in, data, made = where, loader(shuffle=True), fitted()
    with pytest.raises(KeyboardInterrupt):
        made.fit(net, data)
    made.fit(net, data)
    assert (made.global_step, made.batches_seen, made.current_epoch) == (9 if group == 3 else 24, 24, 3)
    assert torch.allclose(net.head.weight, whole.head.weight, atol=1e-6)


def test_a_batch_that_cannot_be_given_again_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shorter loader has begun anew within the group."""

    class Pairs(Averaged):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch[0], batch_idx)

    net, made = Pairs(), trainer(tmp_path, max_epochs=1, accumulate_grad_batches=4)
    net.interrupts_at = 6
    with pytest.raises(KeyboardInterrupt):
        made.fit(net, [loader(), loader(40)])
    assert "3 batches were not finished, and cannot be given again by this loader" in capsys.readouterr().out


@pytest.mark.parametrize("epochs", [2, 4])
def test_an_average_that_misses_an_epoch_is_said(
    tmp_path: Path, epochs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was stopped in its validation; after the last one, the module gets the average that there is."""

    class Stopped(Validated):
        def on_validation_end(self) -> None:
            if self.number == 2:
                raise KeyboardInterrupt

    averages = StochasticWeightAveraging(0.05, epochs // 2)
    made = trainer(tmp_path, max_epochs=epochs, num_sanity_val_steps=0, callbacks=[averages])
    net = Stopped()
    with pytest.raises(KeyboardInterrupt):
        made.fit(net, loader(), loader(16))
    assert "the average is without the weights of epoch 1, which was stopped" in capsys.readouterr().out
    averaged = made.averaging.average
    made.fit(net, loader(), loader(16))
    assert (made.current_epoch, int(averaged.n_averaged), made.averaging.has_ended) == (epochs, epochs // 2, True)
    assert torch.equal(net.head.weight, averaged.module.head.weight)
    with pytest.raises(UsageError, match="the module has its averaged weights"):
        made.fit(net, loader(), loader(16))


def stops_once_in(net: Net, hook: str) -> None:
    def stop(*_: Any) -> None:
        setattr(net, hook, lambda *_: None)
        raise KeyboardInterrupt

    setattr(net, hook, stop)


@pytest.mark.parametrize("every", [1.0, 4])
@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_save_checkpoint"])
def test_an_epoch_after_which_a_fit_was_stopped_is_done(tmp_path: Path, hook: str, every: int | float) -> None:
    net = Validated()
    stops_once_in(net, hook)
    made = trainer(tmp_path, max_epochs=2, val_check_interval=every)
    with pytest.raises(KeyboardInterrupt):
        made.fit(net, loader(), loader(16))
    made.fit(net, loader(), loader(16))
    assert (net.seen, made.global_step, made.current_epoch) == ([*range(8)] * 2, 16, 2)


class SavesIn(Validated):
    """Saves a checkpoint in a hook of its third epoch, once."""

    hook, path = "", Path()

    def __init__(self) -> None:
        super().__init__()
        self.saved = False
        setattr(self, self.hook, self.save)

    def save(self, *_: Any) -> None:
        if self.trainer.current_epoch == 2 and not self.saved:
            self.saved = True
            self.trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("epochs", [3, 4])
@pytest.mark.parametrize(("hook", "left"), [
    ("on_train_epoch_start", 8), ("on_train_batch_end", 7), ("on_validation_end", 0),
    ("on_validation_epoch_end", 0), ("on_train_epoch_end", 0),
])  # fmt: skip
def test_a_checkpoint_of_any_hook_has_the_rest_of_its_epoch(
    tmp_path: Path, hook: str, left: int, epochs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = type("Saves", (SavesIn,), {"hook": hook, "path": tmp_path / "c.ckpt"})()
    trainer(tmp_path, max_epochs=epochs).fit(whole, loader(), loader(16))
    capsys.readouterr()
    net, made = Validated(), trainer(tmp_path, max_epochs=epochs)
    made.fit(net, loader(), loader(16), ckpt_path=tmp_path / "c.ckpt")
    assert net.seen == [*range(8 - left, 8), *[*range(8)] * (epochs - 3)]
    assert (made.global_step, made.current_epoch) == (8 * epochs, epochs)
    assert torch.allclose(net.head.weight, whole.head.weight)
    assert ("3 epochs, 24 steps are done" in capsys.readouterr().out) == (left == 0 and epochs == 3)
    made.max_epochs = epochs + 1
    made.fit(net, loader(), loader(16))
    assert (made.global_step, made.current_epoch) == (8 * epochs + 8, epochs + 1)


def test_a_fit_without_batches_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = trainer(tmp_path, max_epochs=1, callbacks=[StochasticWeightAveraging(0.1, swa_epoch_start=1)])
    kept = Validated()
    first.fit(kept, loader(), loader(16))
    first.save_checkpoint(tmp_path / "c.ckpt")
    for limit in (0, 0.0):
        net, made = Validated(), trainer(tmp_path, max_epochs=3, limit_train_batches=limit)
        made.fit(net, loader(), loader(16))
        assert (net.seen, made.global_step, made.current_epoch) == ([], 0, 0)
        assert "limit_train_batches=0: nothing is trained" in capsys.readouterr().out
        made.fit(net, loader(), loader(16), ckpt_path=tmp_path / "c.ckpt")
        assert (net.seen, made.global_step, made.current_epoch) == ([], 8, 1)
        assert "limit_train_batches=0: nothing is trained" in capsys.readouterr().out
        assert torch.equal(net.head.weight, kept.head.weight)
    assert not list(tmp_path.glob("**/epoch=2*"))
