"""Callbacks by the names that people know. Any object with `on_…` methods is one."""

from nbtrain.trainer.callbacks.base import Callback
from nbtrain.trainer.callbacks.batch_size_finder import BatchSizeFinder
from nbtrain.trainer.callbacks.early_stopping import EarlyStopping
from nbtrain.trainer.callbacks.learning_rate_finder import LearningRateFinder
from nbtrain.trainer.callbacks.model_checkpoint import ModelCheckpoint
from nbtrain.trainer.callbacks.schedules import GradientAccumulationScheduler, LearningRateMonitor
from nbtrain.trainer.callbacks.weight_averaging import StochasticWeightAveraging

__all__ = [
    "BatchSizeFinder",
    "Callback",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "StochasticWeightAveraging",
]
