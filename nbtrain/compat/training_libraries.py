"""Training libraries that bring their own distribution: where each decides how many processes there are.

Nothing here imports them. The paths are those of the modules that define the classes: the packages' own names for them
come later, or lazily. accelerate 1.15, transformers 5.23, Lightning 2.6 and DeepSpeed 0.19 were looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessAware:
    """A class whose objects look how many processes there are when they are made."""

    word: str
    """how a user calls it"""
    module: str
    name: str
    uses: tuple[str, ...]
    """methods that train: the object has to know the ranks by then"""
    instead: str = ""
    """what may be written in place of making it below `-s none`"""
    takes: str = ""
    """a class of settings that it is given, which have looked how many processes there are, too"""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def processes(settings: Any) -> int:
    """The number of processes that these settings have seen."""
    return int(getattr(settings, "world_size", 1))


_FIT = ("fit", "validate", "test", "predict")
_DOOR = ', or leave %%distributed out and give it strategy="nbtrain_ddp"'
_SETUP = ("launch", "setup", "setup_module", "setup_dataloaders")

CLASSES: tuple[ProcessAware, ...] = (
    ProcessAware(
        word="transformers' Trainer",
        module="transformers.trainer",
        name="Trainer",
        uses=("train",),
        takes="TrainingArguments",
    ),
    ProcessAware(
        word="accelerate's Accelerator", module="accelerate.accelerator", name="Accelerator", uses=("prepare",)
    ),
    ProcessAware(
        word="Lightning's Trainer", module="lightning.pytorch.trainer.trainer", name="Trainer", uses=_FIT, instead=_DOOR
    ),
    ProcessAware(
        word="Lightning's Trainer", module="pytorch_lightning.trainer.trainer", name="Trainer", uses=_FIT, instead=_DOOR
    ),
    ProcessAware(word="Lightning's Fabric", module="lightning.fabric.fabric", name="Fabric", uses=_SETUP),
    ProcessAware(word="Lightning's Fabric", module="lightning_fabric.fabric", name="Fabric", uses=_SETUP),
)

DEEPSPEED = "deepspeed.initialize"
"""Makes an engine of a model, which shares out, averages and steps."""
HOROVOD = "horovod.torch.DistributedOptimizer"
"""Averages what the optimizer steps with."""
LAUNCHERS = "accelerate.launchers"
"""Its functions start processes and run a function in each."""
