"""Running statistics of batch norms, which ranks average so that all of them evaluate the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.compat.layers import NormLayer


def launch_statistics(norms: Iterable[NormLayer]) -> Callable[[], None]:
    """Send the running statistics, in one message per dtype and device. What is returned waits, and takes their
    averages."""
    groups: dict[tuple[torch.dtype, torch.device], list[tuple[NormLayer, torch.Tensor]]] = {}
    for norm in norms:
        for buffer in (norm.running_mean, norm.running_var):
            if buffer is not None:
                groups.setdefault((buffer.dtype, buffer.device), []).append((norm, buffer))
    sent = []
    for group in groups.values():
        flat = torch.cat([buffer.reshape(-1) for _, buffer in group]).div_(dist.get_world_size())
        sent.append((group, flat, dist.all_reduce(flat, async_op=True)))

    def take() -> None:
        for buffers, flat, work in sent:
            work.wait()
            for (norm, buffer), mean in zip(buffers, flat.split([b.numel() for _, b in buffers]), strict=True):
                if norm.training:  # the others have not changed, and are not to by rounding
                    buffer.data.copy_(mean.view_as(buffer))  # the graph may be used once more

    return take


def norms_of(modules: Iterable[nn.Module]) -> list[NormLayer]:
    """The layers whose running statistics are to be averaged. SyncBatchNorm averages its own."""
    parts = {id(part): part for module in modules for part in module.modules()}
    return [part for part in parts.values() if isinstance(part, NormLayer) and not isinstance(part, nn.SyncBatchNorm)]
