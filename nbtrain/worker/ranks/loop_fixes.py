"""Makes lines of a plain loop right that would silently go wrong on several ranks.

ReduceLROnPlateau.step(loss)   by the ranks' mean, or their learning rates would part
SyncBatchNorm                  works on the CPU, too
anything with "cuda"           on a rank without a GPU: says what to write
what follows a model in pieces torch.jit.trace, torch.export, torch.fx: says what to write
what meets a weight in pieces  its array, torch.nn.utils.prune, torch.ops, DTensor's methods: says what to write
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from traceback import walk_tb
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.fx.proxy import TraceError

from nbtrain.base.errors import text_of
from nbtrain.compat import layers
from nbtrain.compat.compiler import TRACERS
from nbtrain.compat.cuda import asked_for_a_card
from nbtrain.compat.dtensor import met_undivided, was_not_followed
from nbtrain.compat.intercept import Listeners
from nbtrain.compat.modules import named_parts, said_while_loading
from nbtrain.strategies.base import Prepared
from nbtrain.worker.ranks.collectives import Reduced, connected, reduce

NO_CUDA = (
    "This rank computes on the CPU: for it there is no 'cuda'. Write .to(device) in place of .cuda() and .to('cuda'): "
    "`device` is there on every rank and is its own. Or ask for GPUs with --devices"
)
READ_ONLY = (
    "If the array was made of a weight (`p.detach().numpy()`): weights are in pieces here, and it is a copy. Make it "
    "and write to it in one block: `with whole(model): w = model[0].weight.detach().numpy(); w *= 0.9`"
)
REPLACED = (
    "Where weights are in pieces a model keeps its parameters while a cell runs: write `with whole(model, optimizer): "
    "…` around what puts tensors in their places (torch.nn.utils.prune, parametrizations)"
)
SWAPPED = (
    "Ranks hold the tensors that a cell trains: exchange what these contain: `with whole(model): was = "
    "p.detach().clone(); p.data.copy_(q); q.data.copy_(was)`"
)
UNDIVIDED = (
    "an operator of torch.ops was given a parameter or gradient in pieces, and an ordinary tensor: call torch's own "
    "function (torch.add, not torch.ops.aten.add), or write `with whole(model): …` around the line"
)
FOLLOWED = (
    "torch.func and dual numbers cannot follow what brings weights in pieces together: write `with whole(model): …` "
    "around the line"
)
ORDINARY = (
    "Under fsdp only weights, gradients, states and what is computed of them number by number are DTensors; what else "
    "is computed of them is an ordinary, complete tensor. Leave the line out, or write `with whole(model): …` around it"
)
TRACED = (
    "torch.jit.trace, torch.export and torch.fx cannot follow what ranks do around a model in pieces: write `with "
    "whole(model): …` around the line"
)
STACKED = (
    "Ranks call a model that a cell trains through a class of its own: write `with whole(*models): …` around "
    "stack_module_state"
)
PUT_IN_PLACE = tuple(f"torch.nn.utils.{one}" for one in ("prune", "parametriz", "weight_norm", "spectral_norm"))
"""what puts tensors in the places of parameters"""
LINES = "`with whole(", "--strategy "
"""what nbtrain's own sentences name"""
OF_DTENSORS = frozenset({"device_mesh", "full_tensor", "placements", "redistribute", "to_local"})
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""SyncBatchNorm is none of them."""
BATCH_NORM = (
    "batch norm normalises each rank's own samples, not those of all ranks in a step. To have it normalise all of "
    "them: model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"
)


def listen(listeners: Listeners, active: Callable[[], bool], apart: Callable[[], bool]) -> None:
    """`active`: whether a cell runs, and the strategy sets up its models. `apart`: whether its ranks compute with
    shares of a batch, and not the same each, as inside of `with whole(…)`."""
    schedule, plateau = "torch.optim.lr_scheduler.LRScheduler.step", torch.optim.lr_scheduler.ReduceLROnPlateau
    listeners.listen(schedule, "lines", lambda old: _plateau(old, active), plateau)
    listeners.listen("torch.nn.SyncBatchNorm.forward", "lines", lambda old: _norm(old, apart))


def _plateau(old: Any, active: Callable[[], bool]) -> Any:
    def step(scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        if active() and connected():
            metrics = reduce(float(metrics))
        return old(scheduler, metrics, *args, **kwargs)

    return step


def explain(error: BaseException, device: torch.device, in_pieces: bool) -> None:
    """Say what to write in place of "cuda", if a cell has raised this because the rank has none; and where weights are
    `in_pieces` in place of what torch or numpy cannot do with them."""
    caught = said_while_loading(error) if in_pieces else ""
    if any(line in caught for line in LINES):
        error.args = (caught,)
    elif in_pieces and (sentence := _of_pieces(error)):
        error.args = (f"{str(error).rstrip('. ')}. {sentence}",)
    if "stack_module_state: Expected all models to be of the same class" in text_of(error):
        error.args = (f"{error} {STACKED}",)
    if any(f.f_code.co_name == "swap_tensors" for f, _ in walk_tb(error.__traceback__)):
        error.args = (f"{error}. {SWAPPED}",)
    if device.type == "cpu" and asked_for_a_card(error):
        error.args = (f"{error}. {NO_CUDA}",)


def _of_pieces(error: BaseException) -> str:
    text = text_of(error)
    if isinstance(error, ValueError) and text.endswith("is read-only"):
        return READ_ONLY
    if isinstance(error, (AttributeError, TypeError)) and _through(error, PUT_IN_PLACE):
        return REPLACED
    if text.startswith("Creating a Parameter from"):
        return REPLACED
    if isinstance(error, AttributeError) and isinstance(error.obj, torch.Tensor) and error.name in OF_DTENSORS:
        return ORDINARY
    if was_not_followed(error) and _through(error, "torch.distributed."):
        return FOLLOWED
    if _through(error, TRACERS) and not isinstance(error, TraceError):
        return TRACED
    return UNDIVIDED if met_undivided(error) else ""


def _through(error: BaseException, modules: str | tuple[str, ...]) -> bool:
    """Whether it came through a function of these modules."""
    return any(str(f.f_globals.get("__name__")).startswith(modules) for f, _ in walk_tb(error.__traceback__))


def _norm(old: Any, apart: Callable[[], bool]) -> Any:
    def forward(norm: nn.SyncBatchNorm, x: torch.Tensor) -> Any:
        if not (norm.training and connected()):
            return old(norm, x)
        if not apart():
            return super(nn.SyncBatchNorm, norm).forward(x)
        return _of_the_whole_batch(norm, x) if x.device.type == "cpu" else old(norm, x)

    return forward


def _of_the_whole_batch(norm: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    layers.check_input(norm, x)
    shape = (1, -1, *[1] * (x.dim() - 2))
    around = [i for i in range(x.dim()) if i != 1]
    wide = x.double()
    count = wide.new_full((1,), x.numel() / x.shape[1])
    mine = torch.cat([wide.sum(around), wide.square().sum(around), count])
    parts: torch.Tensor = Reduced.apply(mine, "sum", reduce)
    sums, squares = parts[:-1].chunk(2)
    total = parts[-1].detach()
    same = torch.allclose(parts.detach(), mine.detach() * (total / count), rtol=1e-13, atol=0)
    samples = count if same else total  # of one process: where every rank sees the same batch, those of one
    mean = sums / total
    var = squares / total - mean.square()
    if norm.track_running_stats and norm.running_mean is not None and norm.running_var is not None:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            norm.running_var.lerp_((var * (samples / (samples - 1))).to(norm.running_var.dtype), share)
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
