"""Training libraries that bring their own distribution: where each decides how many processes there are.

Nothing here imports them. The paths are those of the modules that define the classes: the packages' own names for them
come later, or lazily. accelerate 1.15, transformers 5.23, Lightning 2.6 and DeepSpeed 0.19 were looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbtrain.compat.internals import Internals

SAVE_PRETRAINED = (
    "transformers.modeling_utils.PreTrainedModel.save_pretrained", "peft.peft_model.PeftModel.save_pretrained",
)  # fmt: skip
its = Internals("accelerate")
its.members("accelerate.state.AcceleratorState", "_reset_state")
its.members("accelerate.state.GradientState", "_reset_state")


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
    on_cpu: str = ""
    """how it is made where it does not see by itself that the ranks compute on the CPU"""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def forget_processes() -> None:
    """Let accelerate, where a rank has imported it, look anew how many processes there are and what they compute in:
    it remembers what its first `Accelerator` was told, and refuses another."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


WRAPPED = ("forward", "_original_forward")
"""what accelerate puts into a model that computes in another precision: a forward that cannot be sent to another
process, and the one that it stands for"""


def take_wrapper(model: Any) -> dict[str, Any] | None:
    """Off a model that accelerate has prepared; None: there is none."""
    attributes = vars(model)
    if "accelerate" not in sys.modules or WRAPPED[1] not in attributes:
        return None
    return {name: attributes.pop(name) for name in WRAPPED if name in attributes}


def is_split_by_node(dataset: Any) -> bool:
    """Whether an iterable data set of Hugging Face's gives each rank a part: `split_dataset_by_node` has made it."""
    return "datasets" in sys.modules and getattr(dataset, "_distributed", None) is not None


def ends_of_rows(dataset: Any) -> list[str]:
    """The first and the last row of a data set of Hugging Face's as they are stored: nothing is decoded or drawn."""
    kind = getattr(sys.modules.get("datasets"), "Dataset", None)
    if kind is None or not isinstance(dataset, kind) or not len(dataset):
        return []
    rows: Any = dataset.with_format("arrow")
    return [str(rows[at].to_pydict()) for at in (0, len(rows) - 1)]


def processes(settings: Any) -> int:
    """The number of processes that these settings have seen."""
    return int(getattr(settings, "world_size", 1))


ON_CPU = "ACCELERATE_USE_CPU"
"""A variable: accelerate, and settings of transformers', count processes without a GPU only where it says so."""
STATE = "accelerate.state.PartialState"
"""Counts the processes, once for all objects of accelerate. It does not read the variable itself."""
SETTINGS = "transformers.training_args.TrainingArguments"
SETTINGS_ON_CPU = "TrainingArguments(…, use_cpu=True)"


def told_of_cpu(environment: Mapping[str, str]) -> bool:
    return environment.get(ON_CPU, "").lower() in ("y", "yes", "t", "true", "on", "1")


def processes_of_accelerator(accelerator: Any) -> int | None:
    """None: it does not say."""
    return getattr(accelerator, "num_processes", None)


TRAINER = "transformers.trainer"
"""The module of its Trainer."""
_FIT = ("fit", "validate", "test", "predict")
_DOOR = ', or leave %%distributed out and give it strategy="nbtrain_ddp"'
_SETUP = ("launch", "setup", "setup_module", "setup_dataloaders")

CLASSES: tuple[ProcessAware, ...] = (
    ProcessAware(
        word="transformers' Trainer",
        module=TRAINER,
        name="Trainer",
        uses=("train",),
        takes="TrainingArguments",
    ),
    ProcessAware(
        word="accelerate's Accelerator",
        module="accelerate.accelerator",
        name="Accelerator",
        uses=("prepare",),
        on_cpu="Accelerator(cpu=True)",
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

TRAINERS = ("transformers.trainer.Trainer",)
TRAINER_SETTINGS = (SETTINGS,)
PREPARED = (
    "accelerate.accelerator.Accelerator", "accelerate.state.PartialState", "accelerate.state.AcceleratorState",
    "accelerate.optimizer.AcceleratedOptimizer", "accelerate.scheduler.AcceleratedScheduler",
    "accelerate.data_loader.DataLoaderAdapter", "accelerate.data_loader.BatchSamplerShard",
    "accelerate.data_loader.IterableDatasetShard",
)  # fmt: skip
"""An Accelerator, what it makes of loaders, optimizers and schedules, and what counts the processes for them."""
AVERAGED = ("torch.nn.parallel.distributed.DistributedDataParallel",)


def processes_joined() -> int:
    """How many processes torch has joined to a group, this one included."""
    dist: Any = sys.modules.get("torch.distributed")
    joined = dist is not None and hasattr(dist, "get_world_size") and dist.is_available() and dist.is_initialized()
    return int(dist.get_world_size()) if joined else 1


DEEPSPEED = "deepspeed.initialize"
"""Makes an engine of a model, which shares out, averages and steps."""
HOROVOD = "horovod.torch.DistributedOptimizer"
"""Averages what the optimizer steps with."""
LAUNCHERS = "accelerate.launchers"
"""Its functions start processes and run a function in each."""
