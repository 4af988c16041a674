"""Which models, optimizers and schedulers hang together: what shares a parameter is one component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.compat.modules import tensors_of
from nbtrain.strategies.base import Component
from nbtrain.strategies.kit.component_tensors import buffers_of


def components_in(objects: Mapping[str, object], before: list[Component]) -> list[Component]:
    """The connected components of `objects`, merged with those of `before` that they are connected to."""
    links = _Links()
    for component in before:
        everything = (*component.modules.values(), *component.optimizers.values(), *component.loose.values())
        links.join([*map(id, everything), *map(id, component.parameters()), *map(id, buffers_of(component))])
    for item in objects.values():
        links.join([id(item), *map(id, belonging_to(item))])

    found: dict[int, Component] = {}
    touched = set()
    for component in before:  # first, so that names stay what they were
        for item in (*component.modules.values(), *component.optimizers.values(), *component.loose.values()):
            target = found.setdefault(links.root(id(item)), Component())
            for mine, others in zip(tables_of(target), tables_of(component), strict=True):
                for name, other in others.items():
                    _add(mine, name, other)
            break
    for i, kind in enumerate((nn.Module, Optimizer, LRScheduler)):
        for name, item in objects.items():
            root = links.root(id(item))
            if not isinstance(item, kind) or (kind is nn.Module and not belonging_to(item)):
                continue
            if kind is LRScheduler and root not in found:  # its optimizer is not here
                continue
            touched.add(root)
            _add(tables_of(found.setdefault(root, Component()))[i], name, item)
    chosen = [found[root] for root in found if root in touched]
    for component in chosen:
        _find_loose(component)
    return chosen


def tables_of(component: Component) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return component.modules, component.optimizers, component.schedulers


def belonging_to(item: object) -> list[Any]:
    """What belongs to the same component as this module, optimizer or scheduler."""
    if isinstance(item, nn.Module):
        held, buffered = tensors_of(item)
        return held + buffered
    if isinstance(item, Optimizer):
        return [p for group in item.param_groups for p in group["params"]]
    if isinstance(item, LRScheduler) and isinstance(getattr(item, "optimizer", None), Optimizer):
        return [item.optimizer]
    return []


def _find_loose(component: Component) -> None:
    """Parameters that an optimizer holds and no module owns."""
    component.loose = {}
    owned = set(map(id, component.parameters()))
    for name, optimizer in component.optimizers.items():
        for i, p in enumerate(belonging_to(optimizer)):
            if id(p) not in owned:
                owned.add(id(p))
                component.loose[f"{name}[{i}]"] = p


def _add(table: dict[str, Any], name: str, item: Any) -> None:
    """Add an object once, under its first name; another object of that name gets a number."""
    if any(item is other for other in table.values()):
        return
    free, number = name, 2
    while free in table:
        free, number = f"{name} ({number})", number + 1
    table[free] = item


class _Links:
    """Finds out which ids belong together (union-find)."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def root(self, key: int) -> int:
        while (parent := self.parent.setdefault(key, key)) != key:
            self.parent[key] = key = self.parent[parent]
        return key

    def join(self, keys: list[int]) -> None:
        first = self.root(keys[0])
        for key in keys[1:]:
            self.parent[self.root(key)] = first
