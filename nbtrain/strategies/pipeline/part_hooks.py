"""Hooks that the user has on what lies below a model. While there are some, its parts compute one after the other: then
every rank has what goes in and out of each, and the hooks run on all of them, once, as in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from nbtrain.compat import modules, tensors
from nbtrain.strategies.kit.sharding_units import callable_by_itself
from nbtrain.strategies.pipeline.cut_stages import Line


class PartHooks:
    """The users' hooks on parts of a component's models."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.roots = [line.root for line in lines]
        self.found: dict[int, nn.Module] = {}
        """modules that have some, but for the models themselves: theirs run on every rank anyway"""
        self._count = -1

    def look(self) -> bool:
        """Whether other modules have some than before. Quick where none was registered or removed meanwhile."""
        count = modules.hooks_made()
        if count == self._count and all(map(has_users_hook, self.found.values())):
            return False
        self._count, before = count, self.found.keys()
        self.found = {id(m): m for root in self.roots for m in root.modules() if m is not root and has_users_hook(m)}
        return self.found.keys() != before

    def below(self, root: nn.Module) -> nn.Module | None:
        """One of this model's."""
        return next((m for m in root.modules() if id(m) in self.found), None) if self.found else None

    def apart(self, units: Iterable[tuple[nn.Module, int]]) -> Iterator[tuple[nn.Module, int]]:
        """A part that has such a module inside is taken apart: that one is to be called by every rank."""
        for part, owner in units:
            inside = any(id(m) in self.found and m is not part for m in part.modules())
            if inside or not callable_by_itself(part):
                yield from self.apart((child, owner) for child in part.children())
            else:
                yield part, owner


def users_hook(module: nn.Module) -> Any:
    return next((h for h in modules.call_hooks(module) if tensors.is_users_hook(h, tensors.BY_LIBRARIES)), None)


def has_users_hook(module: nn.Module) -> bool:
    return users_hook(module) is not None


def described(module: nn.Module) -> str:
    """Its hook: a user may know nothing of one that a library has put there."""
    hook = users_hook(module)
    return f"{getattr(hook, '__qualname__', None) or type(hook).__qualname__} of {tensors.module_of(hook)}"
