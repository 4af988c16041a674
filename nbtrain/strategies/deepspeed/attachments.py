"""What DeepSpeed hangs on modules and parameters: found after it was set up, taken off between cells, put back before
the next one. In between the exchange walks over the objects as the notebook knows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nbtrain.compat import deepspeed as ds
from nbtrain.compat.modules import ALL_HOOKS, PARAMETERS

_MISSING = object()


class Attachments:
    """What DeepSpeed has put on these. Made before it is set up; `find` afterwards."""

    def __init__(self, modules: Iterable[nn.Module], parameters: Iterable[torch.Tensor]) -> None:
        self._modules = [(module, dict(vars(module)), _hooks(module)) for module in modules]
        self._parameters = [(p, set(vars(p))) for p in parameters]
        self._on: dict[int, tuple[Any, dict[str, Any]]] = {}
        """by id of a module or parameter: it, and what was put on it"""
        self._under: dict[int, dict[str, Any]] = {}
        """id of a module → what stood in the places of those"""
        self._hung: list[tuple[nn.Module, str, dict[Any, Any]]] = []
        """(module, name of a table of hooks, what is to hang there). The notebook may put another table in its place"""
        self.are_off = False

    def find(self) -> None:
        """Note what is there now and was not before, or is another object than before."""
        for module, before, hooks in self._modules:
            now = vars(module)
            new = {k: v for k, v in now.items() if before.get(k, _MISSING) is not v and k not in ALL_HOOKS}
            if new:
                self._on[id(module)] = module, new
                self._under[id(module)] = {k: before[k] for k in new if k in before}
            for name in ALL_HOOKS:
                table = now.get(name)
                if table:
                    added = {k: v for k, v in table.items() if k not in hooks.get(name, ())}
                    if added:
                        self._hung.append((module, name, added))
        for p, keys in self._parameters:
            new = {k: v for k, v in vars(p).items() if k not in keys}
            if new:
                self._on[id(p)] = p, new
        self._owners: list[Any] = [*(module for module, *_ in self._modules), *(p for p, _ in self._parameters)]

    def of(self, owner: Any) -> dict[str, Any]:
        """The attributes of a module or parameter, with what DeepSpeed has put there, also while that is off."""
        return self._on.get(id(owner), (owner, {}))[1] if self.are_off else vars(owner)

    def take_off(self) -> None:
        self.are_off = True
        for owner in self._owners:
            late = [k for k in vars(owner) if ds.hangs(k)]
            if late:
                self._on.setdefault(id(owner), (owner, {}))[1].update(dict.fromkeys(late))
        for module, name, added in self._hung:
            for key in added:
                vars(module)[name].pop(key, None)
        for owner, new in self._on.values():
            own, before = vars(owner), self._under.get(id(owner), {})
            for name in new:
                # Of now, not of then: a parameter's status has changed, and so have lists of submodules.
                new[name] = own.get(name, _MISSING)
                if name not in before:
                    own.pop(name, None)
                    continue
                if name == PARAMETERS:  # a dict of DeepSpeed's stands in its place
                    _follow(before[name], new[name])
                own[name] = before[name]  # where it stood: the order of attributes is the notebook's

    def put_back(self) -> None:
        self.are_off = False
        for owner, new in self._on.values():
            for name, value in new.items():
                if value is not _MISSING:
                    if name == PARAMETERS:
                        _follow(value, vars(owner)[name])
                    vars(owner)[name] = value
        for module, name, added in self._hung:
            vars(module)[name].update(added)


def _follow(table: dict[str, Any], other: Any) -> None:
    """The same entries in both."""
    if other is _MISSING:
        return
    wanted = dict(dict.items(other))
    if list(table) != list(wanted) or any(dict.get(table, name) is not value for name, value in wanted.items()):
        dict.clear(table)
        dict.update(table, wanted)


def _hooks(module: nn.Module) -> dict[str, set[Any]]:
    return {name: set(vars(module).get(name) or ()) for name in ALL_HOOKS}
