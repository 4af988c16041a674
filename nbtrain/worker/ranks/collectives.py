"""`reduce`, `gather` and `barrier`, as a cell calls them.

Where several ranks see the same batches, one of them speaks for all (`Speakers`). Otherwise `reduce(correct, "sum") /
len(dataset)` would count each sample as often as it is seen. A mean is over all shares of the batches, whatever their
ranks are; `min` and `max` are over all ranks. Where ranks that see the same have something else to say, as of files
that a loop has dealt out by rank, that is not silent: it is a warning.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.strategies.base import Strategy, share_of
from nbtrain.strategies.kit.same_on_ranks import differing

OPERATIONS = ("mean", "sum", "min", "max")


def connected() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_the_wire(tensor: torch.Tensor) -> torch.device:
    """The device to send it from: gloo knows only some operations and dtypes on a GPU, NCCL nothing but GPUs."""
    if dist.get_backend() == "nccl":
        return tensor.device if tensor.is_cuda else torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reduce(value: Any, op: str = "mean") -> Any:
    """The ranks' values as one, on every rank: a number for a number, a new tensor for a tensor.

    `op` is mean, sum, min or max. `reduce(correct, "sum") / len(dataset)` is the accuracy over all ranks. (Under ddp2
    and pipeline, where several ranks see the same batch, one of them speaks for all: see `Speakers`.)
    Nothing is differentiated through it, but for what `torch.autograd.grad(…, create_graph=True)` gave: see
    `gradients/by_autograd_grad.py`.
    """
    check(value, op)
    if isinstance(value, torch.Tensor):
        return _reduce_tensor(value.detach(), op)
    result = float(_reduce_tensor(torch.tensor(float(value), dtype=torch.float64), op))
    return int(result) if isinstance(value, int) and op != "mean" else result


class Reduced(torch.autograd.Function):
    """`reduce` whose backward reduces the gradient in the same way."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, op: str, reduce: Callable[..., Any]) -> Any:
        ctx.how = op, reduce
        return reduce(value, op)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return Reduced.apply(*gradients, *ctx.how), None, None


def check(value: Any, op: str) -> None:
    """Raise if `reduce` cannot take it."""
    if op not in OPERATIONS:
        raise UsageError(f"reduce(..., op={op!r}): there are {', '.join(OPERATIONS)}")
    if isinstance(value, torch.Tensor):
        return
    try:
        float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"reduce() takes numbers and tensors, not {type(value).__name__}; gather(value) brings any object together"
        ) from None


def _reduce_tensor(tensor: torch.Tensor, op: str) -> torch.Tensor:
    if hasattr(tensor, "placements"):  # in pieces, one tensor for all ranks
        return tensor * dist.get_world_size() if op == "sum" else tensor.clone()
    dtype = tensor.dtype
    if dtype == torch.bool:
        dtype = torch.int64
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    if not connected():
        return tensor.to(dtype, copy=True)
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    sent = tensor.to(device=on_the_wire(tensor), dtype=wide, copy=True, memory_format=torch.contiguous_format)
    how = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}.get(op, dist.ReduceOp.SUM)
    dist.all_reduce(sent, op=how)
    if op == "mean":
        sent /= dist.get_world_size()
    return sent.to(device=tensor.device, dtype=dtype)


def gather(value: Any, sync_grads: bool = False) -> list[Any]:
    """Every rank's value, in order of rank, on every rank. Tensors may differ in shape; other values must pickle.

    `sync_grads`: a loss of all of them has the gradients of one process, if every rank computes the same loss: what
    is to be of a whole batch, as the pairs of a contrastive loss. Without it nothing is differentiated through them.
    (Under ddp2 and pipeline one rank speaks for those that see the same batch, and is there for all of them.)
    """
    if sync_grads and isinstance(value, torch.Tensor) and value.requires_grad:
        return list(_GatheredLoss.apply(value)) if connected() else [value]
    tensor = isinstance(value, torch.Tensor)
    if not connected():
        return [value.detach().clone() if tensor else value]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value.detach().cpu() if tensor else value)
    return [part.to(value.device) if tensor and isinstance(part, torch.Tensor) else part for part in parts]


class _GatheredLoss(torch.autograd.Function):
    """`gather` whose backward sums over the ranks: strategies take the mean of the ranks' gradients, and each rank has
    the gradient of the same loss."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = tuple(gather(value))
        ctx.shapes, ctx.rank = [part.shape for part in parts], dist.get_rank()
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = _reduce_tensor(torch.cat([gradient.reshape(-1) for gradient in gradients]), "sum")
        mine: torch.Tensor = summed.split([shape.numel() for shape in ctx.shapes])[ctx.rank]
        return mine.view(ctx.shapes[ctx.rank])


def barrier() -> None:
    """Wait until every rank is here."""
    if connected():
        dist.barrier()


@torch.no_grad()
def equalise(tensors: Iterable[torch.Tensor], checksum: Callable[[torch.Tensor], int]) -> int:
    """Copy rank 0's numbers to every rank, in place; returns how many tensors were sent. Collective.

    Equal tensors are not written: the weights of the notebook are one mapped copy that the ranks share.
    """
    mine = list(tensors)
    if not connected() or not mine:
        return 0
    differ = differing(mine, on_the_wire(mine[0]), checksum)
    groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in itertools.compress(mine, differ):
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in groups.values():
        for batch in _batches(group):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
            wire = flat.view(torch.uint8).to(on_the_wire(flat))  # bytes: every backend can broadcast those
            dist.broadcast(wire, 0)
            if dist.get_rank() == 0:
                continue
            flat = wire.to(flat.device).view(flat.dtype)
            parts = flat.split([tensor.numel() for tensor in batch])
            for tensor, part in zip(batch, parts, strict=True):
                tensor.detach().copy_(part.view(tensor.shape))
    return sum(differ)


def _batches(tensors: list[torch.Tensor], limit: int = 64 * 2**20) -> Iterable[list[torch.Tensor]]:
    """Batches of limited size, so that a large model is never copied whole."""
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    yield batch


FAR = 1e-3
"""relative; what is computed on several GPUs may differ by less"""


class Speakers:
    """`reduce` and `gather` where the first rank of each share of the batches speaks for all of that share."""

    def __init__(self, strategy: Strategy, rank: int, world_size: int) -> None:
        shares = [
            share_of(strategy, i, world_size)[0] if not strategy.facts.hands_off else i for i in range(world_size)
        ]
        self.speaks_for = [shares.index(share) for share in shares]
        """rank → the rank that speaks for it"""
        self.ranks = sorted(set(self.speaks_for))
        self.rank, self.world_size = rank, world_size
        self.silent = rank not in self.ranks
        self.several = len(self.ranks) < world_size
        self.weight = world_size / (len(self.ranks) * shares.count(shares[rank]))
        """in a mean over all ranks; 1 where all shares have as many"""
        self._said: set[str] = set()

    def names(self) -> dict[str, Any]:
        """The functions for the cell's names."""
        return {"reduce": self.reduce, "gather": self.gather} if self.several else {"reduce": reduce, "gather": gather}

    def reduce(self, value: Any, op: str = "mean") -> Any:
        """The ranks' values as one, on every rank: a number for a number, a new tensor for a tensor.

        `op` is mean, sum, min or max. `reduce(correct, "sum") / len(dataset)` is the accuracy over all ranks: in a sum
        one rank speaks for those that see the same batches, so that no sample is counted twice.
        """
        check(value, op)
        if op == "sum":
            mine = torch.zeros(self.world_size, dtype=torch.float64)
            mine[self.rank] = _sign(value)
            signs = reduce(mine, "sum").tolist()
            self._compare('reduce(value, "sum")', signs, "reduce(value) * world_size is the sum over all ranks")
            value = _nothing(value) if self.silent else value
        elif op == "mean" and self.weight != 1:
            value = value * self.weight
        return reduce(value, op)

    def gather(self, value: Any, sync_grads: bool = False) -> list[Any]:
        """The ranks' values, in order of rank, on every rank. Tensors may differ in shape; other values must pickle.

        Of ranks that see the same batches there is one value, the first one's: one speaks for all of them.
        `sync_grads`: it is part of a loss. Where all ranks see the same batches it may be as it is.
        """
        if sync_grads and isinstance(value, torch.Tensor) and value.requires_grad:
            if len(self.ranks) == 1:
                return [value]
            raise NotSupported(
                "gather(…, sync_grads=True) does not know how gradients are put together where several ranks "
                "see the same batches and others do not: use --strategy ddp, under which it works"
            )
        values = gather(value)
        signs = [_sign(part) if isinstance(part, int | float | torch.Tensor) else math.nan for part in values]
        self._compare("gather(value)", signs, "torch.distributed.all_gather_object gets the values of all ranks")
        return [values[rank] for rank in self.ranks]

    def _compare(self, what: str, signs: list[float], instead: str) -> None:
        for rank, speaker in enumerate(self.speaks_for):
            sign, other = signs[speaker], signs[rank]
            if abs(sign - other) > FAR * max(abs(sign), abs(other)) and what not in self._said:
                self._said.add(what)
                warnings.warn(
                    f"{what}: ranks {speaker} and {rank} see the same batches, so rank {speaker} speaks for both, and "
                    f"rank {rank} has another value here, which is left out. {instead}",
                    stacklevel=3,
                )


def _nothing(value: Any) -> Any:
    """Zero in the value's form. Not `value * 0`, which is NaN for infinite numbers."""
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0 if isinstance(value, int) else 0.0


def _sign(value: Any) -> float:
    """A number by which two values can be told apart; nan, which differs from none, where that is not possible."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.layout is not torch.strided:
        return math.nan
    flat = value.detach().reshape(-1)
    flat = (flat.abs() if flat.is_complex() else flat).double()
    return float(flat @ torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)) + len(flat)
