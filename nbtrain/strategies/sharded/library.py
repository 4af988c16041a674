"""Imports FairScale quietly, and makes its objects. It is at its last release."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nbtrain.base.errors import UsageError
from nbtrain.compat import fairscale, modules
from nbtrain.compat.intercept import without

OLD = (
    "FairScale is no longer developed (its last release, 0.4.13, is of 2022); `-s fsdp --sharding SHARD_GRAD_OP` and "
    "`-s deepspeed_stage_2` divide the same"
)


def library() -> tuple[Any, Any]:
    """(OSS, ShardedDataParallel)"""
    try:
        return fairscale.classes()
    except ImportError as error:
        raise UsageError(
            f"the strategy sharded needs FairScale, which cannot be imported here ({error}): pip install "
            f"--no-build-isolation fairscale==0.4.13. {OLD}"
        ) from error


class Never(Optimizer):
    """The optimizer that OSS asks for, which never steps: the user's own does."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's is overloaded
        raise AssertionError("never called")


def make_oss(oss: Any, parameters: list[torch.Tensor]) -> Any:
    """Make an OSS without telling who watches for new optimizers of the user's (worker/setup/in_cell_models.py)."""
    with without("torch.optim.Optimizer.__init__", "torch.optim.Optimizer.add_param_group"), fairscale.quiet():
        return oss(parameters, optim=Never)


def make_parallel(parallel: Any, parameters: list[torch.Tensor], oss: list[Any]) -> Any:
    """Make a ShardedDataParallel around a module of these parameters, which is never called."""
    holder = nn.Module()
    modules.parameters(holder).update({str(number): p for number, p in enumerate(parameters)})
    with fairscale.quiet():
        return parallel(
            holder, oss, broadcast_buffers=False, sync_models_at_startup=False, reduce_buffer_size=0,
            auto_refresh_trainable=False, warn_on_trainable_params_changed=False,
        )  # fmt: skip
