"""What DeepSpeed has written elsewhere: its partitions put together, the weights taken."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

import torch

from nbtrain.errors import UsageError


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
        from nbtrain.strategies._deepspeed.library import imported

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
