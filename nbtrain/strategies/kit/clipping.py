"""Clips gradients to a norm as `clip_grad_norm_` does in one process, also where they lie on several ranks, and where
the parameters belong to several components."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from nbtrain.compat.tensors import norms as norms_of
from nbtrain.strategies.base import Prepared, Shards
from nbtrain.strategies.kit.written_numbers import wrote

Share = tuple[Prepared, list[torch.Tensor], torch.Tensor | None]
"""a component, its parameters, and their norm; None where torch's own functions are right for them"""


def clip_norm(
    components: Sequence[Prepared],
    tensors: list[torch.Tensor],
    max_norm: float | None,
    norm_type: float,
    error_if_nonfinite: bool,
    by_torch: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """`max_norm` None: only the norm is asked for. `by_torch` is called where torch's own function is right."""
    asked = _asked(components, tensors)
    if max_norm is not None and asked and isinstance(asked[0][0], Shards):
        wrote(max_norm)
    simple = max_norm is not None and math.isfinite(max_norm) and not error_if_nonfinite and norm_type >= 0
    if simple and len(asked) == 1:
        assert max_norm is not None
        norm = clip_component(asked[0][0], tensors, max_norm, norm_type)
        return by_torch() if norm is None else norm
    shares = [(component, mine, clip_component(component, mine, math.inf, norm_type)) for component, mine in asked]
    if all(norm is None for _, _, norm in shares):
        return by_torch()
    total = _total(shares, norm_type)
    if error_if_nonfinite and not total.isfinite():
        torch.nn.utils.get_total_norm([total], norm_type, error_if_nonfinite=True)  # raises torch's own error
    if max_norm is not None:
        _scale(shares, total, max_norm, norm_type)
    return total


def clip_component(
    component: Prepared, parameters: list[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor | None:
    if isinstance(component, Shards):
        return component.clip(parameters, max_norm, norm_type)
    component.complete_gradients(parameters)
    return None


def _asked(components: Sequence[Prepared], tensors: list[torch.Tensor]) -> list[tuple[Prepared, list[torch.Tensor]]]:
    """The components that have some of these, and which. What nobody has is the first one's."""
    if len(components) < 2:
        return [(component, tensors) for component in components]
    owner = {id(p): number for number, component in enumerate(components) for p in component.component.parameters()}
    first = min((owner[id(p)] for p in tensors if id(p) in owner), default=0)
    by_owner: dict[int, list[torch.Tensor]] = {}
    for p in tensors:
        by_owner.setdefault(owner.get(id(p), first), []).append(p)
    return [(components[number], mine) for number, mine in sorted(by_owner.items())]


@torch.no_grad()
def _total(shares: Iterable[Share], norm_type: float) -> torch.Tensor:
    """Of the components together. Those without gradients do not count: a negative norm would be that of nothing."""
    norms = []
    for _, mine, norm in shares:
        gradients = [p.grad for p in mine if p.grad is not None]
        if gradients:
            norms.append(torch.nn.utils.get_total_norm(gradients, norm_type) if norm is None else norm)
    if not norms:
        return torch.zeros(())
    together = torch.stack([norm.to(norms[0].device) for norm in norms])
    if len(norms) == 1 or norm_type == 0:  # that one counts gradients
        return together.sum()
    total: torch.Tensor = torch.linalg.vector_norm(together, norm_type)
    return total


@torch.no_grad()
def _scale(shares: Iterable[Share], total: torch.Tensor, max_norm: float, norm_type: float) -> None:
    """All by the same factor: a component clips to the norm that gives it."""
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if factor == 1:
        return
    for component, mine, norm in shares:
        if norm is None:
            clip_to((p.grad for p in mine if p.grad is not None), total, max_norm)
        else:
            clip_component(component, mine, float(factor.to(norm.device) * (norm + 1e-6)), norm_type)


def norm_over_ranks(
    own: list[torch.Tensor],
    norm_type: float,
    device: torch.device | str,
    rest: list[torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """The norm of all. `own`: gradients that no other rank of the group has, or with `parts` a part of each, in one
    order on every rank. `rest`: those that every rank has, which count once. `dtype`: the sum's. Collective."""
    norm_type = float(norm_type)
    mine, others = (_norms(tensors, norm_type, device, dtype) for tensors in (own, rest or []))
    if math.isinf(norm_type):
        return _extreme_over_ranks(mine, others, norm_type > 0, group)
    if norm_type == 0:  # torch counts gradients that are not all zero
        mine, others = mine.ne(0).to(dtype), others.ne(0).to(dtype)
        if parts:
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group)
            return mine.sum() + others.sum()
    total = (mine**norm_type).sum() if norm_type else mine.sum()
    dist.all_reduce(total, group=group)
    if norm_type == 0:
        return total + others.sum()
    return (total + (others**norm_type).sum()) ** (1 / norm_type)


def _norms(
    tensors: list[torch.Tensor], norm_type: float, device: torch.device | str, dtype: torch.dtype
) -> torch.Tensor:
    """The norm of each. An empty part has none, but for the norm 0, which looks at whole gradients."""
    filled = [t for t in tensors if t.numel()]
    norms = [n.to(device, dtype) for n in norms_of(filled, norm_type)] if filled else []
    stacked = torch.stack(norms) if norms else torch.zeros(0, device=device, dtype=dtype)
    if norm_type or len(filled) == len(tensors):
        return stacked
    return stacked.new_zeros(len(tensors)).masked_scatter_(
        torch.tensor([t.numel() > 0 for t in tensors], device=device), stacked
    )


def _extreme_over_ranks(
    mine: torch.Tensor, others: torch.Tensor, largest: bool, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The largest, or the smallest. NaN travels apart: what a backend makes of it may differ among ranks."""
    sign = 1 if largest else -1
    extreme = torch.cat([sign * mine, mine.new_full((1,), 0.0 if largest else -math.inf)]).max()
    sent = torch.stack([extreme.nan_to_num(0.0, math.inf, -math.inf), extreme.isnan().to(extreme.dtype)])
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    extreme = torch.where(sent[1] > 0, math.nan, sent[0])
    return sign * torch.cat([extreme[None], sign * others]).max()


def clip_to(gradients: Iterable[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """In place, by the factor that torch takes. `max_norm` inf: only the norm was asked for."""
    if max_norm == math.inf:
        return
    share = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in gradients:
        grad.mul_(share.to(grad.device, grad.dtype))
