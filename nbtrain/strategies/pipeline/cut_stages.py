"""Which rank computes what: a model's parts in their order, cut into as many stages as there are ranks.

A parameter that lies in one stage is its rank's alone. One that several stages have (tied weights), or that no part
holds (the model's own), is shared: whole on every rank.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import nn

from nbtrain.compat import modules
from nbtrain.errors import NotSupported, UsageError
from nbtrain.strategies.base import is_lazy
from nbtrain.strategies.kit.call_router import plain_class
from nbtrain.strategies.kit.sharding_units import callable_by_itself


@dataclass(slots=True)
class Line:
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


class TooSmall(NotSupported):
    """A model has fewer parts than there are ranks."""


def make_lines(roots: list[nn.Module], ranks: int, balance: str) -> tuple[list[Line], list[nn.Module]]:
    """The models that are cut, and those beside them that are too small for it (a loss with a weight of its own): every
    rank has these whole. Raises where nothing can be cut."""
    lines: list[Line] = []
    small: list[nn.Module] = []
    reason: TooSmall | None = None
    for root in roots:
        try:
            lines.append(make_line(root, ranks, balance))
        except TooSmall as error:
            small.append(root)
            reason = error
    if reason is not None and not lines:
        raise NotSupported(str(reason))
    return lines, small


def make_line(root: nn.Module, ranks: int, balance: str) -> Line:
    """Cut by parameters, or as `balance` says: measured costs are known later. Raises `TooSmall`."""
    chain = is_chain(root)
    parts = list(links(root)) if chain else list({id(m): m for m in _inner(root)}.values())
    parts = [part for part in parts if chain or holds(part)]
    name = type(root).__name__
    if len(parts) < ranks or not any(map(holds, parts)):
        said = "1 part" if len(parts) == 1 else f"{len(parts)} parts"
        raise TooSmall(
            f"{name} has {said} to be divided among the {ranks} stages of --strategy pipeline: an nn.Sequential is cut "
            "between its layers, another model between its blocks and its other direct parts. Take fewer ranks, or "
            "--strategy fsdp (ddp where the model fits into one rank)"
        )
    line = Line(root, parts, chain)
    line.counts = given_counts(balance, len(parts), ranks, name) or cut([size(part) for part in parts], ranks)
    return line


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


def cut(costs: Sequence[float], ranks: int) -> list[int]:
    """Contiguous stages with the smallest largest sum; of equal ones those whose squares are least. None is empty."""
    sums = [0, *itertools.accumulate(costs)]

    @cache
    def best(start: int, left: int) -> tuple[float, float, tuple[int, ...]]:
        if left == 1:
            rest = sums[-1] - sums[start]
            return rest, rest**2, (len(costs) - start,)
        found = []
        for end in range(start + 1, len(costs) - left + 2):
            here = sums[end] - sums[start]
            largest, squares, counts = best(end, left - 1)
            found.append((max(here, largest), squares + here**2, (end - start, *counts)))
        return min(found)

    return list(best(0, ranks)[2])


def size(part: nn.Module) -> int:
    return sum(p.numel() for p in part.parameters() if not is_lazy(p))


def holds(part: nn.Module) -> bool:
    return next(part.parameters(), None) is not None or next(part.buffers(), None) is not None


def is_chain(module: nn.Module) -> bool:
    return plain_class(module).forward is nn.Sequential.forward


def _hooked(module: nn.Module) -> bool:
    return any(modules.forward_hooks(module))


def links(chain: nn.Module) -> Iterator[nn.Module]:
    """The parts of a Sequential, and of those in it."""
    for child in modules.children(chain).values():
        if child is not None and is_chain(child) and not _hooked(child):
            yield from links(child)
        elif child is not None:
            yield child


def _inner(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a model that is no Sequential: blocks, and what is beside them."""
    for child in module.children():
        listed = isinstance(child, nn.ModuleList | nn.ModuleDict) or (is_chain(child) and not _hooked(child))
        if listed:
            yield from _listed(child)
        elif not _hooked(child) and _has_blocks(child):
            yield from _inner(child)
        else:
            yield child


def _listed(box: nn.Module) -> Iterator[nn.Module]:
    repeated = Counter(type(inner) for inner in box.children() if next(inner.children(), None) is not None)
    for inner in box.children():
        if repeated[type(inner)] > 1 and callable_by_itself(inner):
            yield inner
        elif isinstance(inner, nn.ModuleList | nn.ModuleDict) or (is_chain(inner) and not _hooked(inner)):
            yield from _listed(inner)
        elif not _hooked(inner) and _has_blocks(inner):
            yield from _inner(inner)
        else:
            yield inner


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
    lines: Iterable[Line], parameters: list[torch.Tensor], buffers: list[torch.Tensor], promoted: set[int]
) -> Owners:
    """`promoted`: ids of those that every rank has for another reason: a model computes with them past their part."""
    places: dict[int, set[int]] = {}
    inside: Counter[int] = Counter()
    everywhere: Counter[int] = Counter()
    for line in lines:
        for part, stage in line.owners():
            for tensor in (*part.parameters(), *part.buffers()):
                places.setdefault(id(tensor), set()).add(stage)
        parts = {id(m) for part in line.parts for m in part.modules()}
        for module in line.root.modules():
            for held in (*modules.parameters(module).values(), *modules.buffers(module).values()):
                if held is not None:
                    everywhere[id(held)] += 1
                    inside[id(held)] += id(module) in parts

    def owner(tensor: torch.Tensor) -> int | None:
        found = places.get(id(tensor), set())
        alone = len(found) == 1 and inside[id(tensor)] == everywhere[id(tensor)] and id(tensor) not in promoted
        return min(found) if alone else None

    of = {id(t): rank for t in (*parameters, *buffers) if (rank := owner(t)) is not None}
    return Owners(
        of,
        [t for t in (*parameters, *buffers) if id(t) in of],
        [p for p in parameters if id(p) not in of],
    )


def describe(line: Line, ranks: int, name: Callable[[nn.Module], str]) -> str:
    """`stage 0: layers 0-3, 1.2 M numbers | …`"""
    said, first = [], 0
    for stage, parts in enumerate(line.stages()):
        last = first + len(parts) - 1
        which = f"{name(parts[0])} to {name(parts[-1])}" if last > first else name(parts[0])
        said.append(f"stage {stage}: {which}, {_numbers(sum(map(size, {id(p): p for p in parts}.values())))}")
        first = last + 1
    return f"{type(line.root).__name__} in {ranks} stages: " + " | ".join(said)


def _numbers(count: int) -> str:
    for unit, factor in ((" G", 10**9), (" M", 10**6), (" k", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f}{unit} numbers"
    return f"{count} numbers"
