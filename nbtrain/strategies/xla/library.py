"""The calls of torch_xla that we make: documented ones, but for one, which `torchrun` reaches in the same way.

Read in torch_xla 2.9 (PJRT). Nothing here is imported where torch_xla is not needed, and the kernel never needs it: a
process that has touched an XLA device holds it, and no other can have it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from nbtrain.base.errors import UsageError
from nbtrain.base.specs import RankInfo
from nbtrain.compat import xla
from nbtrain.compat.intercept import Listeners

_listeners = Listeners()
"""listeners that stay as long as the process lives"""


def take_place(info: RankInfo) -> None:
    """Choose this rank's device of the machine, before anything else of XLA."""
    os.environ.setdefault("PJRT_DEVICE", "TPU")
    try:
        runtime = xla.runtime()
    except ImportError as error:
        raise UsageError(
            f"--accelerator tpu: torch_xla cannot be imported ({error}): pip install torch_xla, of the version that "
            f"torch {torch.__version__} has"
        ) from error
    _listeners.listen("torch.Tensor.__reduce_ex__", "xla", _pickle_as_cpu)
    if os.environ["PJRT_DEVICE"] == "CPU":  # XLA's CPU client knows one process
        return
    if info.world_size > 1:
        runtime.initialize_multiprocess(info.local_rank, info.world_size // info.nodes)
    else:
        runtime.initialize_singleprocess()


def _pickle_as_cpu(old: Callable[..., Any]) -> Callable[..., Any]:
    """Pickle tensors as CPU ones (`torch.save`): whoever reads the file, the notebook for one, may have no XLA."""

    def reduce(tensor: torch.Tensor, protocol: Any) -> Any:
        if on_device(tensor):
            tensor = tensor.detach().cpu().requires_grad_(tensor.requires_grad and tensor.is_leaf)
        return old(tensor, protocol)

    return reduce


def device() -> torch.device:
    import torch_xla

    device_there: torch.device = torch_xla.device()
    return device_there


def together() -> int:
    """The number of devices that XLA's own collectives reach."""
    import torch_xla.runtime as runtime

    return int(runtime.world_size())


def average(tensors: list[torch.Tensor], ranks: int) -> None:
    """Average in place, as a part of the graph that XLA records."""
    import torch_xla.core.xla_model as xm

    xm.all_reduce(xm.REDUCE_SUM, tensors, scale=1.0 / ranks, pin_layout=False)


def sync() -> None:
    """Compile and run what XLA has recorded."""
    import torch_xla

    torch_xla.sync()


def seed(number: int) -> None:
    """Seed the random numbers that models draw on the device."""
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(number)


def on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"
