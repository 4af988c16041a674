"""What a written loop calls to validate, test and predict, and for averaged weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nbtrain.trainer.logged_values import LoggedValues
from nbtrain.trainer.metrics import runtime_here
from nbtrain.trainer.module import has
from nbtrain.trainer.predictions import RankPredictions
from nbtrain.trainer.training_parts import ALL, TrainingParts
from nbtrain.training.data.metrics_alone import MetricsAlone
from nbtrain.training.data.whole_batches import WholeBatches

STATISTICS = "statistics"
"""the stage in which batch norm's are counted anew"""


class EvaluationParts(TrainingParts):
    """The part of a Trainer that its loop speaks to while it evaluates or predicts, on every rank."""

    predictions_in_memory = 2 * 10**9
    """bytes that `predict` holds in memory; what is beyond them it writes to files"""

    def __init__(self) -> None:
        super().__init__()
        self.keeps_predictions = True
        self.predictions: list[list[Any]] = []
        """of each loader, in order, on rank 0"""
        self.notes_samples = False
        """whether `predicted_samples` is wanted"""
        self.predicted_samples: list[torch.Tensor | None] = []
        """of each loader the indices of its samples, in the order of the predictions; None: they have none"""
        self.predictions_folder = ""
        self._kept: RankPredictions | None = None
        self._alone: MetricsAlone | None = None
        """while every rank has all samples"""
        self._modes: list[tuple[Any, bool]] = []
        """of the module's parts, while an evaluation has put them into eval mode"""
        self._seen_in_epoch = 0
        """the number of its last batch"""

    def _let_go_of_the_run(self) -> None:
        for one, mode in self._modes:
            one.training = mode
        self._modes, self._kept = [], None
        self._together_again()
        super()._let_go_of_the_run()

    def limit(self, loader: Any) -> int:
        if self.stage == STATISTICS:  # as many as the last epoch had
            return (self._seen_in_epoch + 1) * self._shares()
        return super().limit(loader)

    def _together_again(self) -> None:
        if self._alone is not None:
            self._alone.end()
            self._alone = None

    def begin_evaluation(self, stage: str) -> None:
        self._before = self.stage, self.batch_idx, self._batch, self._outputs
        if self._in_epoch and not self._trained:
            self._note_position()
        self.stage, self._batch, self._outputs = stage, None, []
        self._modes = [(one, one.training) for one in self.module.modules()]
        if has(self.module, f"on_{stage}_model_eval"):
            self.call(f"on_{stage}_model_eval")
        else:
            self.module.eval()
        self._alone = MetricsAlone(self.module.modules())
        self._logged[stage] = LoggedValues(stage)
        if stage == "predict":
            self.predictions, self.predicted_samples = [], []
        self.call(f"on_{stage}_start")
        self.call(f"on_{stage}_epoch_start")

    @contextmanager
    def sanity_check(self) -> Iterator[None]:
        """A few batches of the validation, before hours of training end in its first error. Nothing remembers it."""
        metrics = dict(self.callback_metrics), dict(self.logged_metrics)
        runtime = runtime_here()
        states = runtime.randomness.state_dict() if runtime is not None else torch.get_rng_state()
        self.sanity_checking = True
        self.call("on_sanity_check_start")
        try:
            yield
        finally:
            self.sanity_checking = False
            self.callback_metrics, self.logged_metrics = metrics
            self._new, self._for_loggers, self._fresh, self._validated = {}, {}, set(), False
            if runtime is not None:
                runtime.randomness.load_state_dict(states)
            else:
                torch.set_rng_state(states)
        self.call("on_sanity_check_end")

    def end_evaluation(self) -> None:
        stage, logged = self.stage, self._logged[self.stage]
        self._take(logged.of_epoch(None, False), whole=True)
        if has(self.module, f"{stage}_epoch_end"):
            getattr(self.module, f"{stage}_epoch_end")(self._outputs[0] if len(self._outputs) == 1 else self._outputs)
        self.call(f"on_{stage}_epoch_end")
        self._take(logged.of_epoch(None, True), whole=True)
        self.loader_of = dict(logged.by_loader)
        self._together_again()
        if not self.sanity_checking:
            self._draw()
            self.to_loggers()
        self.call(f"on_{stage}_end")
        self._back_to_training(stage)
        self._go_back()
        self._validated = True
        if self.training and self.validates_within_epochs and not self.sanity_checking:
            self.call("on_epoch_metrics")
            self.call("on_checkpoint")
            self._fresh, self._validated = set(), False

    def _back_to_training(self, stage: str) -> None:
        """Layers that were frozen in eval mode stay so."""
        modes, self._modes = self._modes, []
        if modes and has(self.module, f"on_{stage}_model_train"):
            self.call(f"on_{stage}_model_train")
            return
        for one, mode in modes:
            one.training = mode

    def _go_back(self) -> None:
        self.stage, self.batch_idx, self._batch, self._outputs = self._before
        self._before = None

    def shared_batches(self, loader: Any, dataloader_idx: int = 0) -> Iterator[tuple[int, Any]]:
        """Of all batches those that this rank predicts, whole ones, so that each is what one process gives."""
        self.dataloader_idx = dataloader_idx
        kept = self._rank_predictions(dataloader_idx)
        self._kept = kept if self.keeps_predictions else None
        runtime = runtime_here()
        mine = (runtime.loaders.deal.index, runtime.loaders.deal.count) if runtime is not None else (0, 1)
        drawing = runtime.randomness.shared() if runtime is not None else None
        with self._seen_whole():
            dealt = WholeBatches(loader, self.limit(loader), mine, drawing)
            batches = iter(dealt)
        for batch_idx, batch in batches:
            self.batch_idx, self._batch = batch_idx, self._transferred(batch)
            self._call_batch("start")
            yield batch_idx, self._batch
        self._batch, self.dataloader_idx = None, 0
        if self.keeps_predictions:
            self.predictions.append(dealt.whole(kept.items))
        if self.notes_samples:
            orders = runtime.loaders.evaluations.orders if runtime is not None else None
            self.predicted_samples.append(dealt.samples(orders.indices(loader) if orders is not None else None))

    def _rank_predictions(self, dataloader_idx: int) -> RankPredictions:
        most = self.predictions_in_memory // self.world_size
        if self._kept is not None:  # of the loader before
            most = self._kept.left
        runtime = runtime_here()
        if runtime is not None and runtime.info.nodes > 1:  # a file of another machine is no use
            most = ALL
        return RankPredictions(Path(self.predictions_folder, f"loader_{dataloader_idx}"), most)

    def keep(self, prediction: Any) -> None:
        self._output = prediction
        self._call_batch("end")
        if self._kept is not None:
            self._kept.add(self.batch_idx, prediction)

    def end_predictions(self) -> None:
        self.call("on_predict_epoch_end")
        self.call("on_predict_end")
        self._together_again()
        self._back_to_training("predict")
        self._go_back()

    # -- averaged weights ----------------------------------------------------------------------

    def has_averaged(self, averaged: Any) -> bool:
        if self.limits["train"] == 0:
            return False
        if averaged.n_averaged > 0:
            self.averaging.has_ended = True
            return True
        self.print("no epoch's weights were averaged: the training ended before the first that counts")
        return False

    @contextmanager
    def batch_statistics(self) -> Iterator[None]:
        """Batch norm's are counted anew, by the weights as they are. Every rank sees all batches of an epoch."""
        norms = [
            one for one in self.module.modules() if getattr(one, "running_mean", None) is not None and one.training
        ]
        momenta = [one.momentum for one in norms]
        before, self.stage = self.stage, STATISTICS
        metrics = dict(self.callback_metrics), dict(self.logged_metrics), dict(self._new), dict(self._for_loggers)
        self._logged[STATISTICS] = LoggedValues(STATISTICS)
        self._seen_in_epoch = self.batch_idx
        if self.batch_idx < 0:  # there was no epoch left
            self._seen_in_epoch = int(min(self.num_training_batches, ALL)) - 1
        for one in norms:
            one.reset_running_stats()
            one.momentum = None  # the mean of all batches
        try:
            yield
        finally:
            self.stage, self._batch = before, None
            self.callback_metrics, self.logged_metrics, self._new, self._for_loggers = metrics
            for one, momentum in zip(norms, momenta, strict=True):
                one.momentum = momentum
