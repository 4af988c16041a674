"""Objects that only exist by the history of a notebook, and are saved beside the script."""

from __future__ import annotations

import builtins
import io
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from nbtrain.errors import UsageError
from nbtrain.export.needed_statements import Slice, Statement
from nbtrain.export.source import Exported, Source

UNCHANGING = (int, float, complex, str, bytes, type(None), type, type(builtins), torch.device, torch.dtype)


def unchanging(namespace: Mapping[str, Any], history: list[Statement]) -> frozenset[str]:
    """Names that have only been numbers, functions, or losses: what nothing changes."""
    texts: dict[str, set[str]] = {}
    for one in history:
        for name in one.binds:
            texts.setdefault(name, set()).add(one.text)
    return frozenset(
        name for name, bound in texts.items() if len(bound) == 1 and name in namespace and _is_still(namespace[name])
    )


def _is_still(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return not value.state_dict()
    return isinstance(value, UNCHANGING) or (callable(value) and hasattr(value, "__qualname__"))


def saved_objects(source: Source, names: set[str], found: Slice, result: Exported) -> dict[str, Any]:
    """Objects that only exist by history: nothing in it makes them, or it made them with numbers that it would draw
    otherwise."""
    saved: dict[str, Any] = {}
    for name in sorted(found.missing - source.writes):  # what the cell binds itself it will not read before
        if name in source.namespace:
            _save(name, source.namespace[name], "no cell that was run makes it", saved, result)
        elif not hasattr(builtins, name):
            result.notes.append(
                f"{name}: no cell makes it, and the notebook has none; the script has to say what it is"
            )
    used = names.union(*(one.reads | one.late for one in found.statements))
    seeded: frozenset[str] = frozenset()
    drawn: dict[str, str] = {}
    for at, one in enumerate(found.statements):
        unseeded = one.effect.draws - seeded
        seeded |= one.effect.seeds
        later = set().union(*(each.binds | each.changes for each in found.statements[at:]))
        # what is saved is as it is at the end: what was made of it before has to be saved, too
        of = sorted(one.reads & drawn.keys() & later)
        if not (unseeded or of):
            continue
        why = f"cell [{one.cell}] draws it without a seed" if unseeded else drawn[of[0]]
        drawn.update(dict.fromkeys((one.binds | one.changes) & used, why))
    for name, why in sorted(drawn.items()):
        value = source.namespace.get(name)
        if _is_data(value):
            _save(name, value, why, saved, result)
        elif value is not None and not isinstance(value, nn.Module | Optimizer) and not _is_still(value):
            result.notes.append(f"{name}: {why}, and it is not saved: it starts with other values than in the notebook")
    return saved


def _is_data(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.requires_grad  # it would be saved trained
    own = type(value).__module__.startswith(("numpy", "pandas"))
    return own or isinstance(value, list | dict | tuple | int | float | str | Dataset)


class _Parts(pickle.Pickler):
    """The models and optimizers in a value, and the notebook's own types."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.trained: list[Any] = []
        self.types: set[str] = set()

    def persistent_id(self, value: Any) -> None:
        weights = isinstance(value, nn.Module) and bool(value.state_dict())
        if weights or isinstance(value, Optimizer) or (isinstance(value, torch.Tensor) and value.requires_grad):
            self.trained.append(value)
        named = value if hasattr(value, "__qualname__") else type(value)
        if getattr(named, "__module__", None) == "__main__":
            self.types.add(named.__qualname__.split(".")[0])


def _parts(value: Any) -> _Parts:
    found = _Parts()
    found.dump(value)
    return found


def own_types(value: Any) -> set[str]:
    return _parts(value).types


def _save(name: str, value: Any, why: str, saved: dict[str, Any], result: Exported) -> None:
    if isinstance(value, type(builtins)):
        result.notes.append(f"{name} is the module {value.__name__}, which no cell imports: the script does")
        return
    try:
        parts = _parts(value)
    except Exception as error:  # whatever its class raises
        raise UsageError(f"export: {name} is needed, {why}, and it cannot be saved: {error}") from None
    if parts.trained:
        held = type(parts.trained[0]).__name__
        raise UsageError(
            f"export: {name} is needed, {why}, and its {held} is not saved, as it would be with the weights of today: "
            f"run a cell of the notebook that makes {name}, then the %%distributed cell, and export that"
        )
    saved[name] = value
    result.notes.append(f"{name} is saved beside the script: {why}")
