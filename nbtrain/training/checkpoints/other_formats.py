"""What others have written: the weights are taken, whoever cut them up.

DeepSpeed's partitions are put together; a folder of torch.distributed.checkpoint is read tensor by tensor, and so is a
checkpoint file of Lightning's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from nbtrain.errors import UsageError
from nbtrain.training.checkpoints.rank_parts import Described


def is_deepspeed(path: Path) -> bool:
    """A folder with the file `latest`, or the folder of one step in there."""
    return path.is_dir() and (_tagged(path) or ((path / "latest").is_file() and _tagged(_newest(path))))


def weights(path: Path) -> Mapping[str, torch.Tensor]:
    """The whole model in 32 bits. It takes as much host memory as that."""
    step = path if _tagged(path) else _newest(path)
    if not list(step.glob("*zero_pp_rank_*_optim_states.pt")):  # stage 0, or no optimizer: the weights are whole
        states = torch.load(_first(step), map_location="cpu", weights_only=False)
        return {key: value for key, value in states["module"].items() if isinstance(value, torch.Tensor)}
    if find_spec("deepspeed") is None:
        raise UsageError(
            f"{path} was written by DeepSpeed in {len(list(step.glob('*_optim_states.pt')))} partitions, and only "
            "DeepSpeed can put them together: pip install deepspeed"
        )
    before = dict(os.environ)
    try:
        from nbtrain.strategies.deepspeed.library import imported

        imported(torch.device("cpu"))
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it tells of every partition
            return dict(get_fp32_state_dict_from_zero_checkpoint(str(step.parent), tag=step.name))
    finally:
        for name in os.environ.keys() - before.keys():  # DeepSpeed's import sets some
            del os.environ[name]


def _newest(path: Path) -> Path:
    return path / (path / "latest").read_text().strip()


def _tagged(path: Path) -> bool:
    return path.is_dir() and next(path.glob("*_model_states.pt"), None) is not None


def _first(step: Path) -> Path:
    return sorted(step.glob("*_model_states.pt"))[0]


# -- torch.distributed.checkpoint -----------------------------------------------------------------

OF_OPTIMIZERS = ("optim", "sched")
"""How parts of a checkpoint begin that hold no weights."""


def is_torchs(path: Path) -> bool:
    """A folder that torch.distributed.checkpoint has written, in full: this file is the last."""
    return (path / ".metadata").is_file()


def torchs(path: Path) -> tuple[dict[str, dict[str, str]], dict[str, Described], Callable[[str], torch.Tensor]]:
    """Models (name → tensor's name in the model → key), what keys stand for, and what reads one."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = checkpoint.FileSystemReader(path).read_metadata()
    described = {
        key: Described(tuple(one.size), one.properties.dtype)
        for key, one in metadata.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    whole_path: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    models: dict[str, dict[str, str]] = {}
    for key in described:
        *holder, name = map(str, whole_path.get(key, (key,)))
        if not any(part.startswith(OF_OPTIMIZERS) for part in holder):
            models.setdefault(".".join(holder), {})[name] = key

    def read(key: str) -> torch.Tensor:
        one = described[key]
        found = {key: torch.empty(one.shape, dtype=one.dtype)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no other process takes part
            checkpoint.load(found, storage_reader=checkpoint.FileSystemReader(path), no_dist=True)
        return found[key]

    return models, described, read


# -- Lightning ------------------------------------------------------------------------------------

LIGHTNING = "pytorch-lightning_version"


def lightnings(path: Path) -> Mapping[str, torch.Tensor] | None:
    """The weights in a checkpoint file of its Trainer's; None: it is none. They are read when they are asked
    for."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=False, mmap=True)
    except Exception as error:
        raise UsageError(f"{path} cannot be read as a checkpoint file of Lightning's: {error}") from error
    if not isinstance(held, dict) or LIGHTNING not in held:
        return None
    return {key: value for key, value in held["state_dict"].items() if isinstance(value, torch.Tensor)}
