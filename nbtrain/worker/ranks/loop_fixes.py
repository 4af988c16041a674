"""Makes lines of a plain loop right that would silently go wrong on several ranks.

ReduceLROnPlateau.step(loss)   by the ranks' mean, or their learning rates would part
SyncBatchNorm                  works on the CPU, too
anything with "cuda"           on a rank without a GPU: says what to write
update_bn(loader, model)       running statistics are counted over the batches of all ranks

In `update_bn` each rank sees its share; the mean over the ranks is what one process counts. It is recognised by what it
does, as a program may have a function of its own: `reset_running_stats`, and a loader to its end, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import nn

from nbtrain.compat import layers
from nbtrain.compat.cuda import INITIALISE
from nbtrain.compat.modules import NORM_LAYER, named_parts
from nbtrain.intercept import Listeners
from nbtrain.strategies.base import Prepared
from nbtrain.training.ranks.collectives import connected, reduce

NO_CUDA = (
    "This rank computes on the CPU: for it there is no 'cuda'. Write .to(device) in place of .cuda() and .to('cuda'): "
    "`device` is there on every rank and is its own. Or ask for GPUs with --devices"
)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""SyncBatchNorm is none of them."""
BATCH_NORM = (
    "batch norm normalises each rank's own samples, not those of all ranks in a step. To have it normalise all of "
    "them: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
)


def listen(listeners: Listeners, active: Callable[[], bool], device: torch.device) -> None:
    """`active`: whether a cell runs, and the strategy sets up its models."""
    listeners.listen("torch.optim.lr_scheduler.ReduceLROnPlateau.step", "lines", lambda old: _plateau(old, active))
    listeners.listen("torch.nn.SyncBatchNorm.forward", "lines", lambda old: _norm(old, active))
    if device.type == "cpu":
        listeners.listen(INITIALISE, "lines", lambda old: _no_cuda(old, active))


def _plateau(old: Any, active: Callable[[], bool]) -> Any:
    def step(scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        if active() and connected():
            metrics = reduce(float(metrics))
        return old(scheduler, metrics, *args, **kwargs)

    return step


def _no_cuda(old: Any, active: Callable[[], bool]) -> Any:
    def lazy_init() -> Any:
        try:
            return old()
        except Exception as error:  # of this very type: compilers ask in this way whether there are GPUs
            if active():
                error.args = (f"{error}. {NO_CUDA}",)
            raise

    return lazy_init


def _norm(old: Any, active: Callable[[], bool]) -> Any:
    def forward(norm: nn.SyncBatchNorm, x: torch.Tensor) -> Any:
        if x.device.type != "cpu" or not (norm.training and active() and connected()):
            return old(norm, x)
        return _of_the_whole_batch(norm, x)

    return forward


class _Sum(torch.autograd.Function):
    """The sum over the ranks, of the values and of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def _of_the_whole_batch(norm: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    layers.check_input(norm, x)
    shape = (1, -1, *[1] * (x.dim() - 2))
    around = [i for i in range(x.dim()) if i != 1]
    wide = x.double()
    count = wide.new_full((1,), x.numel() / x.shape[1])
    parts: torch.Tensor = _Sum.apply(torch.cat([wide.sum(around), wide.square().sum(around), count]))
    sums, squares = parts[:-1].chunk(2)
    total = parts[-1].detach()
    mean = sums / total
    var = squares / total - mean.square()
    if norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            norm.running_var.lerp_((var * (total / (total - 1))).to(norm.running_var.dtype), share)
    y = ((wide - mean.view(shape)) * (var + norm.eps).rsqrt().view(shape)).to(x.dtype)
    return y if norm.weight is None else y * norm.weight.view(shape) + norm.bias.view(shape)


class BatchNorms:
    """The layers of models that normalise by the samples that this rank has of a batch."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Prepared, WeakSet[nn.Module]] = WeakKeyDictionary()
        """Models are gone through once, as they were set up."""

    def train(self, several: Collection[Prepared]) -> bool:
        """Whether one of them is in training mode."""
        for prepared in several:
            if prepared not in self._of:
                parts = (part for model in prepared.component.modules.values() for _, part in named_parts(model))
                self._of[prepared] = WeakSet(part for part in parts if isinstance(part, BATCH_NORMS))
        return any(part.training for prepared in several for part in self._of[prepared])


class RunningStatistics:
    """Averages over the ranks the running statistics of layers that were reset, when a loader has ended."""

    def __init__(self, active: Callable[[], bool]) -> None:
        self.active = active
        self.norms: list[Any] = []

    def begin(self) -> None:
        self.norms.clear()

    def listen(self, listeners: Listeners) -> None:
        listeners.listen(f"{NORM_LAYER}.reset_running_stats", "norms", self._reset)

    def _reset(self, old: Callable[[Any], None]) -> Callable[[Any], None]:
        def reset(norm: Any) -> None:
            old(norm)
            if not torch.is_grad_enabled() and self.active():
                self.norms.append(norm)

        return reset

    def share(self) -> None:
        """At the end of a loader. Collective, if there is anything to share."""
        if not self.norms or torch.is_grad_enabled():
            return
        norms, self.norms = self.norms, []
        for norm in norms:
            for buffer in (norm.running_mean, norm.running_var):
                if buffer is not None and norm.training and norm.num_batches_tracked:
                    buffer.copy_(reduce(buffer))
