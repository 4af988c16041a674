"""Which rank computes what: a model's parts in their order, cut into as many stages as there are ranks.

A parameter that lies in one stage is its rank's alone. One that several stages have (tied weights), or that no part
holds (the model's own), is shared: whole on every rank.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from nbtrain.base.errors import NotSupported, UsageError
from nbtrain.compat import modules, tensors
from nbtrain.strategies.base import is_lazy
from nbtrain.strategies.kit.call_router import plain_class
from nbtrain.strategies.kit.units_to_wrap import callable_by_itself


@dataclass(slots=True)
class StagedModel:
    """One model and its stages."""

    root: nn.Module
    parts: list[nn.Module]
    """in the order in which they compute, as far as is known"""
    chain: bool
    """a Sequential: each part is given what the one before returned, and nothing else happens"""
    counts: list[int] = field(default_factory=list)
    """how many parts each stage has"""

    @property
    def ends(self) -> list[int]:
        return list(itertools.accumulate(self.counts))

    def stage_of(self, number: int) -> int:
        """The stage of the part with this number."""
        return next(stage for stage, end in enumerate(self.ends) if number < end)

    def stages(self) -> list[list[nn.Module]]:
        ends = self.ends
        return [self.parts[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def owners(self) -> Iterator[tuple[nn.Module, int]]:
        for stage, parts in enumerate(self.stages()):
            for part in parts:
                yield part, stage

    def describe(self) -> str:
        """`Net in 2 stages: stage 0: layers 0 to 3, 1.2 M numbers | …`"""
        names = {id(m): name for name, m in self.root.named_modules()}
        said = []
        for stage, parts in enumerate(self.stages()):
            first, last = names[id(parts[0])], names[id(parts[-1])]
            which = f"{first} to {last}" if len(parts) > 1 else first
            said.append(f"stage {stage}: {which}, {_numbers(sum(map(size, {id(p): p for p in parts}.values())))}")
        return f"{type(self.root).__name__} in {len(self.counts)} stages: " + " | ".join(said)


class TooSmall(NotSupported):
    """A model has fewer parts than there are ranks."""


def cut_models(
    roots: list[nn.Module], ranks: int, balance: str, trained: bool
) -> tuple[list[StagedModel], list[nn.Module]]:
    """The models that are cut, and those beside them that are too small for it (a loss with a weight of its own): every
    rank has these whole. Raises where nothing can be cut that is `trained`."""
    staged_models: list[StagedModel] = []
    small: list[nn.Module] = []
    reason: TooSmall | None = None
    for root in roots:
        try:
            staged_models.append(cut_model(root, ranks, balance))
        except TooSmall as error:
            small.append(root)
            reason = error
    if reason is not None and trained and not staged_models:
        raise NotSupported(str(reason))
    return staged_models, small


def cut_model(root: nn.Module, ranks: int, balance: str) -> StagedModel:
    """Cut by parameters, or as `balance` says. Raises `TooSmall`."""
    chain = is_chain(root)
    parts = list(links(root)) if chain else list({id(m): m for m in _unwrapped(root)}.values())
    parts = [part for part in parts if chain or holds(part)]
    name = type(root).__name__
    if len(parts) < ranks or not any(map(holds, parts)):
        said = "1 part" if len(parts) == 1 else f"{len(parts)} parts"
        raise TooSmall(
            f"{name} has {said} to be divided among the {ranks} stages of --strategy pipeline: an nn.Sequential is cut "
            "between its layers, another model between its blocks and its other direct parts. Take fewer ranks, or "
            "--strategy fsdp (ddp where the model fits into one rank)"
        )
    staged = StagedModel(root, parts, chain)
    staged.counts = given_counts(balance, len(parts), ranks, name) or cut_evenly([size(part) for part in parts], ranks)
    return staged


def given_counts(balance: str, parts: int, ranks: int, name: str) -> list[int]:
    """`2,3,2,1`; nothing where stages are to be found."""
    if not balance[:1].isdigit():
        return []
    counts = [int(count) for count in balance.split(",")]
    if len(counts) != ranks:
        raise UsageError(f"--balance {balance} is for {len(counts)} stages, and there are {ranks} ranks")
    if sum(counts) != parts:
        raise UsageError(f"--balance {balance} places {sum(counts)} parts, and {name} has {parts}")
    return counts


def cut_evenly(costs: Sequence[float], ranks: int) -> list[int]:
    """Contiguous stages with the smallest largest sum; of equal ones those whose squares are least. None is empty."""
    sums = [0, *itertools.accumulate(costs)]

    @cache
    def best(start: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        if left == 1:
            rest = sums[-1] - sums[start]
            return rest, rest**2, (len(costs) - start,)
        cuts = []
        for end in range(start + 1, len(costs) - left + 2):
            here = sums[end] - sums[start]
            largest, squares, counts = best(end, left - 1)
            cuts.append((max(here, largest), squares + here**2, (end - start, *counts)))
        return min(cuts)

    return list(best(0, ranks)[2])


def size(part: nn.Module) -> int:
    return sum(p.numel() for p in part.parameters() if not is_lazy(p))


def holds(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None or next(part.buffers(), None) is not None


def is_chain(module: nn.Module) -> bool:
    """A Sequential that does nothing else: it may have been given a forward of its own."""
    return plain_class(module).forward is nn.Sequential.forward and "forward" not in vars(module)


def links(chain: nn.Module) -> Iterator[nn.Module]:
    """The parts of a Sequential, and of those in it. One to which a library has put a hook is a part as it is; with a
    user's hook no stage is called (`ModuleHooks`)."""
    for child in modules.children(chain).values():
        if child is not None and is_chain(child) and (users_hook(child) or not modules.call_hooks(child)):
            yield from links(child)
        elif child is not None:
            yield child


def _unwrapped(model: nn.Module) -> list[nn.Module]:
    """Its parts; of a model that wraps a single other one (AveragedModel), those of that one."""
    parts = list(_inner(model))
    while len(parts) == 1 and callable_by_itself(parts[0]):
        inside = list(_inner(parts[0]))
        if not inside:
            break
        parts = inside
    return parts


def _inner(module: nn.Module, box: bool = False) -> Iterator[nn.Module]:
    """The parts of a model that is no Sequential: blocks, and what is beside them. `box`: it is a list of modules."""
    repeated = Counter(type(child) for child in module.children() if box and next(child.children(), None) is not None)
    for child in module.children():
        if repeated[type(child)] > 1 and callable_by_itself(child):
            yield child
        elif isinstance(child, nn.ModuleList | nn.ModuleDict) or (is_chain(child)):
            yield from _inner(child, box=True)
        elif _has_blocks(child):
            yield from _inner(child)
        else:
            yield child


def _has_blocks(module: nn.Module) -> bool:
    for box in module.modules():
        if isinstance(box, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            kinds = Counter(type(inner) for inner in box.children() if next(inner.children(), None) is not None)
            if any(count > 1 for count in kinds.values()):
                return True
    return False


@dataclass(slots=True)
class Owners:
    """Which rank has which of a component's tensors."""

    of: dict[int, int]
    """id of a parameter or buffer → the rank that has it"""
    owned: list[torch.Tensor]
    """parameters, then buffers, in the component's order"""
    shared: list[torch.Tensor]
    """parameters that every rank has"""

    def is_foreign(self, tensor: torch.Tensor, rank: int) -> bool:
        return self.of.get(id(tensor), rank) != rank


def find_owners(
    staged_models: Iterable[StagedModel],
    parameters: list[torch.Tensor],
    buffers: list[torch.Tensor],
    promoted: set[int],
) -> Owners:
    """`promoted`: ids of those that every rank has for another reason: a model computes with them past their part."""
    places: dict[int, set[int]] = {}
    inside: Counter[int] = Counter()
    everywhere: Counter[int] = Counter()
    for staged in staged_models:
        for part, stage in staged.owners():
            for tensor in (*part.parameters(), *part.buffers()):
                places.setdefault(id(tensor), set()).add(stage)
        parts = {id(m) for part in staged.parts for m in part.modules()}
        for module in staged.root.modules():
            for tensor_there in (*modules.parameters(module).values(), *modules.buffers(module).values()):
                if tensor_there is not None:
                    everywhere[id(tensor_there)] += 1
                    inside[id(tensor_there)] += id(module) in parts

    def owner(tensor: torch.Tensor) -> int | None:
        ranks_there = places.get(id(tensor), set())
        alone = len(ranks_there) == 1 and inside[id(tensor)] == everywhere[id(tensor)] and id(tensor) not in promoted
        return min(ranks_there) if alone else None

    of = {id(t): rank for t in (*parameters, *buffers) if (rank := owner(t)) is not None}
    return Owners(
        of,
        [t for t in (*parameters, *buffers) if id(t) in of],
        [p for p in parameters if id(p) not in of],
    )


def _numbers(count: int) -> str:
    for unit, factor in ((" G", 10**9), (" M", 10**6), (" k", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f}{unit} numbers"
    return f"{count} numbers"


class ModuleHooks:
    """Finds hooks below a model. Quick where none was registered since it looked last."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.found: nn.Module | None = None
        """a module that has one of the user's: not the model itself, whose own run on every rank anyway"""
        self.computing: list[nn.Module] = []
        """modules that have one of torch's, which sets a weight (kept_by_hooks.py)"""
        self._count = -1

    def look(self) -> nn.Module | None:
        count = modules.hooks_made()
        if count != self._count or self.found is not None:
            self._count = count
            inner = [m for m in self.root.modules() if m is not self.root]
            self.found = next((m for m in inner if users_hook(m) is not None), None)
            self.computing = [m for m in inner if modules.call_hooks(m)]
        return self.found


def users_hook(module: nn.Module) -> Any:
    return next((h for h in modules.call_hooks(module) if tensors.is_users_hook(h, tensors.BY_LIBRARIES)), None)


def hook_name(module: nn.Module) -> str:
    """Its hook: a user may know nothing of one that a library has put there."""
    hook = users_hook(module)
    return f"{getattr(hook, '__qualname__', None) or type(hook).__qualname__} of {tensors.module_of(hook)}"
