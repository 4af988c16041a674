"""What nbtrain/compat relies on in Lightning, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from nbtrain.compat import lightning

L = pytest.importorskip("lightning", reason="lightning is not installed")


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    usual = {
        "enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False,
    }  # fmt: skip
    return L.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, **usual)


def module() -> Any:
    from lightning.pytorch.demos.boring_classes import BoringModel

    return BoringModel()


@pytest.mark.filterwarnings("ignore")
def test_a_run_leaves_nothing_that_only_its_process_can_use(trainer: Any) -> None:
    trainer.fit(module())
    assert trainer.train_dataloader is not None
    lightning.drop_own(trainer)
    assert trainer.train_dataloader is None
    assert trainer.profiler._lightning_module is None
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module)
    assert trainer.current_epoch == 2, "it makes them anew"


@pytest.mark.filterwarnings("ignore")
def test_the_end_of_a_search_is_told_from_an_error(trainer: Any) -> None:
    from lightning.pytorch.trainer.states import TrainerFn

    ended = lightning.tuning_ended(trainer)

    class Searches(L.Callback):  # type: ignore[name-defined,misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            raise ended

    trainer.callbacks.append(Searches())
    trainer.strategy._lightning_module = module()
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    with pytest.raises(ended):
        trainer._fit_impl(trainer.lightning_module)
    lightning.end_tuning(trainer)
    assert trainer.state.finished
    assert trainer.state.stage is None


@pytest.mark.filterwarnings("ignore")
def test_what_a_failed_run_has_begun_is_ended(trainer: Any) -> None:
    trainer.fit(module())
    lightning.tear_down(trainer)
    assert trainer.fit_loop._data_fetcher is None


@pytest.mark.filterwarnings("ignore")
def test_norms_are_synchronized_where_the_trainer_says_so(tmp_path: Path) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    for asked in (False, True):
        trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", sync_batchnorm=asked, **quiet)
        trainer.strategy.model = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
        lightning.synchronize_norms(trainer.strategy)
        assert isinstance(trainer.strategy.model[0], torch.nn.SyncBatchNorm) is asked


def test_bars_are_callbacks(trainer: Any) -> None:
    assert all(issubclass(bar, lightning.callback_class(trainer)) for bar in lightning.bars(trainer))


def test_functions_have_the_names_that_users_know() -> None:
    assert lightning.asked_for(L.Trainer._predict_impl) == "predict"
    assert lightning.asked_for(len) == "len"


@pytest.mark.filterwarnings("ignore")
def test_loaders_keep_their_samplers(trainer: Any) -> None:
    before = trainer._accelerator_connector.use_distributed_sampler
    with lightning.own_samplers(trainer):
        assert not trainer._accelerator_connector.use_distributed_sampler
    assert trainer._accelerator_connector.use_distributed_sampler is before


@pytest.mark.filterwarnings("ignore")
def test_a_loader_for_predictions_takes_other_batches(trainer: Any) -> None:
    class Shows(type(module())):  # type: ignore[misc]
        def predict_step(self, batch: Any, index: int) -> Any:
            return batch[0].tolist()

    strategy = trainer.strategy
    old = strategy.process_dataloader

    def second(loader: Any) -> Any:
        lightning.replace_batches(loader, lambda batches: list(batches)[1::2])
        return old(loader)

    strategy.process_dataloader = second
    loader = DataLoader(TensorDataset(torch.arange(8)), 2)
    assert trainer.predict(Shows(), loader) == [[2, 3], [6, 7]]


def test_the_models_that_steps_call() -> None:
    class Parts(L.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.unused = (torch.nn.Linear(2, 2) for _ in range(3))
            self.criterion = torch.nn.MSELoss()

        def shared(self, x: Any) -> Any:
            return self.criterion(self.decoder(self.encoder(x)), x)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.shared(batch)

    class Calls(Parts):
        def forward(self, x: Any) -> Any:
            return self.decoder(self.encoder(x))

        def training_step(self, batch: Any, index: int) -> Any:
            return self.criterion(self(batch), batch)

    parts, calls, plain = Parts(), Calls(), torch.nn.Linear(2, 2)
    assert lightning.called_in_steps(parts) == [parts.encoder, parts.decoder]
    assert lightning.called_in_steps(calls) == [calls]
    assert lightning.called_in_steps(plain) == [plain]
    assert lightning.has_own(parts, "training_step")
    assert not lightning.has_own(parts, "predict_step")
    assert not lightning.has_own(plain, "predict_step")


def test_a_rank_that_was_forked_with_lightning_tells_it_which_it_is() -> None:
    from lightning.pytorch.utilities import rank_zero_only

    said = []
    function = rank_zero_only(lambda: said.append("rank 0"))
    before = rank_zero_only.rank
    try:
        for rank in (1, 0):
            lightning.tell_rank(rank)
            function()
    finally:
        lightning.tell_rank(before)
    assert said == ["rank 0"]
