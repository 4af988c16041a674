"""What torch's functions are given, by position or by name, one or several: as who stands in their place needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from nbtrain.compat import pytree

Args = tuple[Any, ...]
Named = dict[str, Any]


def kept(tensors: Any) -> Any:
    """Something that can be looked at twice; `model.parameters()` can be gone through once."""
    return list(tensors) if isinstance(tensors, Iterator) else tensors


def with_closure(args: Args, kwargs: Named, make: Callable[[Any], Any]) -> tuple[Args, Named] | None:
    """The arguments of an optimizer's `step` with `make(closure)` for its closure; None where it has none."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    made = make(closure)
    return ((args[0], made, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": made})


def listed(tensors: Any) -> list[Any]:
    """A list of the tensors that a backward starts from, or that gradients are asked for."""
    if isinstance(tensors, dict):
        return list(tensors.values())
    if isinstance(tensors, torch.Tensor | GradientEdge) or not hasattr(tensors, "__iter__"):
        return [tensors]
    return list(tensors)


def all_tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested containers, dataclasses, and what torch's pytree knows."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from all_tensors(part)
    elif pytree.is_container(type(value)):
        for part in pytree.tree_leaves(value):
            yield from all_tensors(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from all_tensors(getattr(value, field.name, None))


def scaled_starts(roots: list[torch.Tensor], given: Any, factor: float) -> list[torch.Tensor] | None:
    """The gradients a backward starts from, times `factor`; None where they are wrong, which torch says."""
    starts = [given] * len(roots) if given is None or isinstance(given, torch.Tensor) else list(given)
    if len(starts) != len(roots) or any(s is None and r.numel() != 1 for r, s in zip(roots, starts, strict=True)):
        return None
    return [torch.full_like(r, factor) if s is None else s * factor for r, s in zip(roots, starts, strict=True)]
