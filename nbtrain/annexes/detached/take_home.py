"""Brings what a detached run has left into a notebook: the one that started it, or any other.

All of it is opened as new objects before anything is touched. Then each name is settled:

    nothing of that name                      it is there
    a model, optimizer or schedule of the     in place: the notebook's own object has the run's numbers, and what else
    same structure                            came and holds the run's holds the notebook's
    what the run was sent, unchanged          in place (lists, dicts, sets, arrays, tensors), or assigned anew
    a class or function                       the notebook's stays
    anything else                             the notebook's stays; the run's is in `run.values[name]`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
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


def settle(namespace: dict[str, Any], coming: Mapping[str, Any], sent: Mapping[str, str], run: str) -> list[str]:
    """Put the run's objects, by name, where the notebook has room for them. `sent`: digests of what the run was sent;
    `run`: how the notebook writes it. Returns what became of them, in sentences."""
    became: dict[str, list[str]] = {}
    pairs: list[tuple[Any, Any]] = []
    assigned = {}
    unchanged = {
        name for name in coming if name in namespace and _is_as_sent(namespace[name], sent.get(name), coming[name])
    }
    # Models first: who holds the run's is given the notebook's.
    for name in sorted(coming, key=lambda name: not isinstance(coming[name], nn.Module)):
        theirs, ours = coming[name], namespace.get(name, MISSING)
        if ours is MISSING:
            what = "new"
        elif isinstance(ours, CODE) or isinstance(theirs, CODE):
            continue
        elif (why := _fill_learning(ours, theirs, pairs)) is not None:
            what = f"yours kept, as {why}; the run's is {run}.values[{name!r}]" if why else "in place"
        elif name not in unchanged:
            why = "it has changed since" if sent.get(name) else "nobody can tell whether it has changed since"
            what = f"yours kept, as {why}; the run's is {run}.values[{name!r}]"
        elif _fill_plain(ours, theirs):
            what = "in place"
            pairs.append((theirs, ours))
        else:
            what = "assigned"
        if what in ("new", "assigned"):
            assigned[name] = theirs
        became.setdefault(what, []).append(name)
    namespace.update(assigned)
    replace_references([(theirs, ours) for theirs, ours in pairs if theirs is not ours])
    return [f"{', '.join(names)}: {what}" for what, names in became.items()]


def _is_as_sent(value: Any, sent: str | None, comes: Any) -> bool:
    """Or as it comes home, where that is done once more."""
    return bool(sent) and not isinstance(value, LEARNING) and digest(value) in (sent, digest(comes))


def _fill_learning(ours: Any, theirs: Any, pairs: list[tuple[Any, Any]]) -> str | None:
    """Fill a model, optimizer or schedule. Empty: it is done. None: it is none of these. Else why it cannot be."""
    if not isinstance(theirs, LEARNING):
        return None
    if type(ours).__name__ != type(theirs).__name__:
        return f"it is {_a(theirs)} there and {_a(ours)} here"
    if isinstance(theirs, nn.Module):
        if why := _other_shape(ours, theirs):
            return why
        ours.load_state_dict(theirs.state_dict())
        ours.train(theirs.training)
        pairs += _same_places(ours, theirs)
        return ""
    if isinstance(theirs, Optimizer):
        there, here = ([len(group["params"]) for group in one.param_groups] for one in (theirs, ours))
        if there != here:
            return f"it has {there} parameters in its groups there and {here} here"
        shapes = [[p.shape for group in one.param_groups for p in group["params"]] for one in (theirs, ours)]
        if shapes[0] != shapes[1]:
            return "its parameters have other shapes there"
    ours.load_state_dict(theirs.state_dict())
    pairs.append((theirs, ours))
    return ""


def _other_shape(ours: nn.Module, theirs: nn.Module) -> str:
    here, there = ours.state_dict(), theirs.state_dict()
    for name in (*there, *here):
        if name not in here or name not in there:
            return f"{name} is only {'there' if name in there else 'here'}"
        if isinstance(there[name], torch.Tensor) and there[name].shape != here[name].shape:
            return f"{name} is {tuple(there[name].shape)} there and {tuple(here[name].shape)} here"
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


def _fill_plain(ours: Any, theirs: Any) -> bool:
    """Whether the notebook's own object could take it over."""
    if type(ours) is not type(theirs) or type(ours) in ATOMS:
        return False
    if isinstance(ours, (list, deque)):
        ours.clear()
        ours.extend(theirs)
    elif isinstance(ours, (dict, set)):
        ours.clear()
        ours.update(theirs)
    elif isinstance(ours, torch.Tensor) and ours.shape == theirs.shape and ours.dtype == theirs.dtype:
        with torch.no_grad():
            ours.copy_(theirs)
    elif type(ours).__module__ == "numpy" and getattr(ours, "shape", None) and ours.shape == theirs.shape:
        ours[...] = theirs
    else:
        return False
    return True


def _a(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"
