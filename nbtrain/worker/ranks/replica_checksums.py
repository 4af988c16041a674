"""Checksums of what must be equal on every rank, which the notebook compares when a cell ends."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Set
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from nbtrain.base.events import GROUP, ORDER, WHOLE
from nbtrain.compat import tensors
from nbtrain.compat.modules import tensors_of
from nbtrain.exchange.kinds.checksum import checksum
from nbtrain.strategies.base import Prepared
from nbtrain.strategies.kit import written_numbers
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.parts import Cell, Part
from nbtrain.worker.random_states.rank_random_states import Randomness

if TYPE_CHECKING:
    from nbtrain.worker.setup.components import Components

WRITTEN = "the numbers that it wrote to weights, gradients or states, or in which gradients it set to None"


class ReplicaChecksums(Part):
    """Takes checksums of what has changed since they were taken last, so a cell that trained nothing costs nothing."""

    def __init__(self, components: Components, counts: Steps, randomness: Randomness) -> None:
        self.components, self.counts, self.randomness = components, counts, randomness
        self._stood: WeakKeyDictionary[Prepared, list[tuple[int, int]]] = WeakKeyDictionary()
        self._whole: WeakKeyDictionary[Prepared, int] = WeakKeyDictionary()
        """a number for all that was found when it was looked at last"""
        self.steps = 0

    def begin(self, cell: Cell) -> None:
        written_numbers.begin()

    def weights(self) -> set[int]:
        """Ids of the tensors whose bytes are compared, or which a strategy keeps otherwise on each rank."""
        reached = self.components.reached
        parameters = {id(p) for one in reached for p in one.component.parameters()}
        return parameters | {id(tensor) for one in reached for _, tensor in one.replicas()}

    def take(
        self, rewritten: Set[int] = frozenset(), checksum: Callable[[torch.Tensor], int] = checksum
    ) -> list[tuple[str, int]]:
        """(name, number) of each tensor, if a step was taken or a tensor changed since the last time; and of each
        component as a whole in any case, for another rank may have changed its own. `rewritten`: ids of tensors that
        the cell is known to have changed (`.data` and numpy leave their versions alone). `checksum`: one that knows
        what was read already."""
        steps, randomness = self.counts.total, self.randomness
        stepped = steps != self.steps  # fused optimizers leave versions alone
        prepared = self.components.prepared if stepped else self.components.reached
        stand = list(map(_stand, prepared))
        numbers: list[tuple[str, int]] = []
        moved = stepped or stand != [self._stood.get(one) for one in prepared]
        if moved or (rewritten and not rewritten.isdisjoint(at for one in stand for at, _ in one)):
            found = [[(name, checksum(tensor)) for name, tensor in one.replicas()] for one in prepared]
            numbers = _numbered(chain.from_iterable(found))
            numbers += _numbered(pair for one in prepared for pair in _of_groups(one))
            for one, pairs in zip(prepared, found, strict=True):
                self._whole[one] = zlib.crc32(repr([number for _, number in pairs]).encode())
        self._stood.update(zip(prepared, stand, strict=True))
        numbers += _numbered((f"{_name(one)}{WHOLE}", self._whole.get(one, 0)) for one in prepared)
        self.steps = steps
        numbers.append((WRITTEN, zlib.crc32(repr([round(one, 1) for one in written_numbers.told()[:2]]).encode())))
        if not (randomness.alone or self.components.strategy.facts.hands_off):  # which may draw different numbers
            numbers.append((ORDER, randomness.fingerprint()))
        return numbers


def _stand(prepared: Prepared) -> list[tuple[int, int]]:
    """Which tensors a component has, and how often each was written to."""
    held = [tensor for module in prepared.component.modules.values() for part in tensors_of(module) for tensor in part]
    held += prepared.component.loose.values()
    return list(zip(map(id, held), map(tensors.version, held), strict=True))


def _of_groups(prepared: Prepared) -> list[tuple[str, int]]:
    """Learning rates, betas and the like: a loop may have set one from a rank's own loss."""
    return [
        (f"{name}{GROUP}{i}]['{key}']", zlib.crc32(repr([*map(float, numbers)]).encode()))
        for name, optimizer in prepared.component.optimizers.items()
        for i, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if all(map(_is_number, numbers := value if isinstance(value, tuple) else (value,)))
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _name(prepared: Prepared) -> str:
    component = prepared.component
    return ", ".join([*component.modules, *component.loose, *component.optimizers][:1])


def _numbered(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Make names unique: a model of an earlier cell may have had the name that another one has now."""
    seen: Counter[str] = Counter()
    numbered = []
    for name, number in pairs:
        seen[name] += 1
        numbered.append((name if seen[name] == 1 else f"{name} ({seen[name]})", number))
    return numbered
