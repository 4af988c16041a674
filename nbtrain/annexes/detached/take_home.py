"""Brings what a detached run has left into a notebook: the one that started it, or any other.

All of it is opened as new objects before anything is touched. Then each name is settled:

    nothing of that name                      it is there
    a model of the same structure that it     in place: the notebook's own object has the run's numbers, and what else
    has not trained since, its optimizer and  came and holds the run's holds the notebook's
    its schedule
    what the run was sent, unchanged          in place (lists, dicts, sets, arrays, tensors), or assigned anew
    the same, and the run has deleted it      it is gone
    a class or function                       the notebook's stays
    anything else                             the notebook's stays; the run's is in `run.values[name]`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from nbtrain.annexes.detached.digests import digest
from nbtrain.exchange.kinds.base import ATOMS
from nbtrain.worker.setup.replace_references import replace_references

CODE = (type, FunctionType, ModuleType)
LEARNING = (nn.Module, Optimizer, LRScheduler)
MISSING = object()
NEW, IN_PLACE, ASSIGNED, DELETED, KEPT = "new", "in place", "assigned", "deleted", "yours kept"


class Homecoming:
    """The run's objects, by name, on their way to where the notebook has room for them. Nothing is touched before
    `settle`."""

    def __init__(
        self, namespace: dict[str, Any], coming: Mapping[str, Any], sent: Mapping[str, str], run: str,
        end: Mapping[str, Any], started_here: bool = True,
    ) -> None:  # fmt: skip
        """`sent`: digests of what the run was sent; `run`: how the notebook writes it; `end`: what the run has said
        last, also of which names it has `rebound`, `deleted`, or only held in others (`same`). `started_here`: by this
        kernel; another one's models are made anew, and only what was trained here is more than that."""
        self._started_here = started_here
        self._namespace, self._coming, self._sent, self._run = namespace, coming, sent, run
        self._same = set(end.get("same", ()))
        self._rebound = set(end.get("rebound", ()))
        self.became: dict[str, str] = {}
        """name → what becomes of it"""
        self._filled: dict[int, tuple[str, Any]] = {}
        """ids of the run's objects → under which name the notebook's own is in their place, and that"""
        self._stay: dict[int, str] = {}
        """ids of the run's that learn, or are trained → under which name the notebook keeps its own"""
        # Models first: who holds the run's is given the notebook's. Of two names of one object that is filled once.
        for name in sorted(coming, key=lambda name: (_rank(coming[name]), name in self._rebound)):
            if what := self._becomes(name):
                self.became[name] = what
        for name in sorted(set(end.get("deleted", ())) & namespace.keys()):
            known = digest(namespace[name])
            self.became[name] = DELETED if known and known == sent.get(name) else self._kept(name, "")

    @property
    def kept(self) -> set[str]:
        """Names under which the notebook keeps its own."""
        return {name for name, what in self.became.items() if what.startswith(KEPT)}

    @property
    def afterwards(self) -> dict[str, Any]:
        """The notebook's names as they will be; what is filled is as it was."""
        new = {name: self._coming[name] for name, what in self.became.items() if what in (NEW, ASSIGNED)}
        return {name: value for name, value in self._namespace.items() if self.became.get(name) != DELETED} | new

    def settle(self) -> list[str]:
        """Returns what became of them, in sentences."""
        pairs: list[tuple[Any, Any]] = []
        said: dict[str, list[str]] = {}
        afterwards = self.afterwards
        for name, what in self.became.items():
            if what == IN_PLACE:
                ours, theirs = self._namespace[name], self._coming[name]
                if name not in self._same:
                    _fill(ours, theirs)
                    pairs += _same_places(ours, theirs) if isinstance(ours, nn.Module) else [(theirs, ours)]
                elif isinstance(ours, LEARNING) or digest(ours) == self._sent.get(name):
                    pairs += _parallel(ours, theirs)
                else:
                    pairs.append((theirs, ours))
            elif what == ASSIGNED and name not in self._rebound and not _is_value(self._coming[name]):
                ours, theirs = self._namespace[name], self._coming[name]
                pairs.append((ours, theirs))  # whoever holds it has the run's
            if what != IN_PLACE or name not in self._same:
                said.setdefault(what, []).append(name)
        for name in self.became:
            if name not in afterwards:
                del self._namespace[name]
        self._namespace.update(afterwards)
        replace_references([(old, fresh) for old, fresh in pairs if old is not fresh])
        return [f"{', '.join(names)}: {what}" for what, names in said.items()]

    def _becomes(self, name: str) -> str:
        theirs, ours = self._coming[name], self._namespace.get(name, MISSING)
        if ours is MISSING:
            return NEW
        if isinstance(ours, CODE) or isinstance(theirs, CODE):
            return ""
        learns, is_free = isinstance(theirs, LEARNING), id(theirs) not in self._filled
        why = _unlike(ours, theirs) if learns else ""
        if learns and name not in self._same and (apart := self._apart(ours, theirs)):
            return self._keep(name, why or apart)
        if not why and not self._filled.keys() >= set(map(id, _works_on(theirs))):
            why = "what it works on is not the notebook's"
        if isinstance(theirs, nn.Module) and not why and name not in self._same and self._has_trained(name):
            return self._keep(name, "")
        if is_free and (learns or name in self._same) and not why and type(ours).__name__ == type(theirs).__name__:
            return self._in_place(name)
        if name in self._same:
            return ""
        known = digest(ours)
        if not known or known not in (self._sent.get(name), digest(theirs)):
            return self._keep(name, why)
        if name in self._rebound or not is_free or not _is_fillable(ours, theirs):
            return ASSIGNED
        return self._in_place(name)

    def _in_place(self, name: str) -> str:
        ours, theirs = self._namespace[name], self._coming[name]
        pairs = _same_places(ours, theirs) if isinstance(theirs, nn.Module) else [(theirs, ours)]
        self._filled.update((id(old), (name, own)) for old, own in pairs)
        return IN_PLACE

    def _has_trained(self, name: str) -> bool:
        """Whether the notebook's model is neither what the run was sent nor what it is now: it may not be lost."""
        ours, theirs = self._namespace[name], self._coming[name]
        if (known := digest(ours)) and (known == self._sent.get(name) or known == digest(theirs)):
            return False
        optimizers = [value for value in self._namespace.values() if isinstance(value, Optimizer)]
        return self._started_here or any(p in one.state for one in optimizers for p in ours.parameters())

    def _apart(self, ours: Any, theirs: Any) -> str:
        """Why an optimizer or schedule does not go with the model that is filled."""
        there, here = _works_on(theirs), _works_on(ours)
        if whose := next((self._stay[id(one)] for one in there if id(one) in self._stay), ""):
            return f"it goes with {whose}"
        for one, own in zip(there, here, strict=False):
            name, filled = self._filled.get(id(one), ("", own))
            if filled is not own:
                what = "goes with" if isinstance(ours, LRScheduler) else "trains"
                return f"it {what} another {'optimizer' if isinstance(ours, LRScheduler) else 'model'} than {name!r}"
        return ""

    def _keep(self, name: str, why: str) -> str:
        theirs = self._coming[name]
        for one in (theirs, *(theirs.parameters() if isinstance(theirs, nn.Module) else ())):
            self._stay.setdefault(id(one), name)
        return self._kept(name, why)

    def _kept(self, name: str, why: str) -> str:
        why = why or f"{'it has' if self._sent.get(name) else 'nobody can tell whether it has'} changed since"
        has = f"the run's is {self._run}.values[{name!r}]" if name in self._coming else "the run has deleted it"
        return f"{KEPT}, as {why}; {has}"


def _rank(value: Any) -> int:
    """What others work on comes before them."""
    return next((at for at, kind in enumerate((nn.Module, torch.Tensor, Optimizer)) if isinstance(value, kind)), 3)


def _works_on(value: Any) -> list[Any]:
    if isinstance(value, Optimizer):
        return [p for group in value.param_groups for p in group["params"]]
    return [value.optimizer] if isinstance(value, LRScheduler) else []


def _unlike(ours: Any, theirs: Any) -> str:
    """Why a model, optimizer or schedule cannot be filled with the run's; empty: it can."""
    if type(ours).__name__ != type(theirs).__name__:
        return f"it is {_a(theirs)} there and {_a(ours)} here"
    if isinstance(theirs, nn.Module):
        return _other_shape(ours, theirs) or _other_parts(ours, theirs)
    if isinstance(theirs, Optimizer):
        there, here = ([len(group["params"]) for group in one.param_groups] for one in (theirs, ours))
        if there != here:
            return f"it has {there} parameters in its groups there and {here} here"
        shapes = [[p.shape for group in one.param_groups for p in group["params"]] for one in (theirs, ours)]
        if shapes[0] != shapes[1]:
            return "its parameters have other shapes there"
    return ""


def _other_shape(ours: nn.Module, theirs: nn.Module) -> str:
    here, there = ours.state_dict(), theirs.state_dict()
    for name in (*there, *here):
        if name not in here or name not in there:
            return f"{name} is only {'there' if name in there else 'here'}"
        if isinstance(there[name], torch.Tensor) and there[name].shape != here[name].shape:
            return f"{name} is {tuple(there[name].shape)} there and {tuple(here[name].shape)} here"
    return ""


def _other_parts(ours: nn.Module, theirs: nn.Module) -> str:
    here, there = ({name: _a(part) for name, part in one.named_modules()} for one in (ours, theirs))
    for name in (*there, *here):
        if here.get(name) != there.get(name):
            return f"{name} is {there.get(name, 'nothing')} there and {here.get(name, 'nothing')} here"
    return ""


def _same_places(ours: nn.Module, theirs: nn.Module) -> list[tuple[Any, Any]]:
    """(the run's, the notebook's) of every module, parameter and buffer."""
    pairs: list[tuple[Any, Any]] = []
    tables: tuple[Callable[[nn.Module], Any], ...] = (
        lambda m: m.named_modules(), lambda m: m.named_parameters(), lambda m: m.named_buffers(),
    )  # fmt: skip
    for table in tables:
        mine = dict(table(ours))
        pairs += [(value, mine[name]) for name, value in table(theirs) if name in mine]
    return pairs


def _parallel(ours: Any, theirs: Any) -> Iterator[tuple[Any, Any]]:
    """(the run's, the notebook's) of all that one leads to, where neither side has changed it."""
    todo, met = [(ours, theirs)], set()
    while todo:
        ours, theirs = todo.pop()
        if type(ours) is not type(theirs) or type(ours) in ATOMS or isinstance(ours, CODE) or id(theirs) in met:
            continue
        met.add(id(theirs))
        if not _is_value(ours):
            yield theirs, ours
        if isinstance(ours, list | tuple | deque):
            todo += zip(ours, theirs, strict=False)
        elif isinstance(ours, dict):
            todo += [(ours[key], value) for key, value in theirs.items() if key in ours]
        todo.append((getattr(ours, "__dict__", None), getattr(theirs, "__dict__", None)))


def _is_value(value: Any) -> bool:
    """It does not matter which one of several that are equal."""
    return type(value) in ATOMS or isinstance(value, tuple | frozenset)


def _is_fillable(ours: Any, theirs: Any) -> bool:
    """Whether the notebook's own object can take over what the run's holds."""
    if type(ours) is not type(theirs) or type(ours) in ATOMS:
        return False
    if isinstance(ours, torch.Tensor):
        return bool(ours.shape == theirs.shape and ours.dtype == theirs.dtype)
    if type(ours).__module__ == "numpy":
        return bool(getattr(ours, "shape", None) and ours.shape == theirs.shape)
    return isinstance(ours, list | deque | dict | set)


def _fill(ours: Any, theirs: Any) -> None:
    if isinstance(ours, LEARNING):
        ours.load_state_dict(theirs.state_dict())
        if isinstance(ours, nn.Module):
            ours.train(theirs.training)
    elif isinstance(ours, torch.Tensor):
        with torch.no_grad():
            ours.copy_(theirs)
    elif isinstance(ours, list | deque):
        ours.clear()
        ours.extend(theirs)
    elif isinstance(ours, dict | set):
        ours.clear()
        ours.update(theirs)
    elif type(ours).__module__ == "numpy":
        ours[...] = theirs


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
