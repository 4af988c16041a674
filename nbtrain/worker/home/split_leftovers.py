"""Tensors in pieces that a cell has made: gradients that were kept, a `state_dict`, a norm that no rank has whole.

To bring one together every rank has to hold its part: they compare what they have, name by name. What is below a name
that only some ranks have, or have otherwise, stays as it is.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist


def find_strays(values: Mapping[str, Any], known: set[int], world_size: int) -> tuple[list[Any], list[Any]]:
    """Below these names, the same on all ranks: those that are divided by rows, and all others. Collective. `known`:
    ids of those that are passed by."""
    if not {"torch.distributed.tensor", "nbtrain.strategies.kit.tensor_spots"} & sys.modules.keys():
        return [], []
    from nbtrain.strategies.kit.row_shards import by_rows as rows

    def by_rows(tensor: Any) -> bool:
        return not _on_one_rank(tensor) and rows(tensor)

    found = {name: [t for t in parted_tensors([value]) if id(t) not in known] for name, value in values.items()}
    mine = {name: [(tuple(t.shape), str(t.dtype), by_rows(t)) for t in held] for name, held in found.items() if held}
    identities = {name: [id(t) for t in found[name]] for name in mine}
    everybody: list[Any] = [(mine, identities)]
    if world_size > 1:
        everybody = [None] * world_size
        dist.all_gather_object(everybody, (mine, identities))
    agreed = [name for name in sorted(mine) if all(theirs.get(name) == mine[name] for theirs, _ in everybody)]
    alike = _pattern(agreed, identities)
    if any(_pattern(agreed, theirs) != alike for _, theirs in everybody):  # two names of one here, two objects there
        return [], []
    tensors = list({id(t): t for name in agreed for t in found[name]}.values())
    return [t for t in tensors if by_rows(t)], [t for t in tensors if not by_rows(t)]


def parted_tensors(values: Iterable[Any]) -> list[Any]:
    """DTensors in these and in the containers and plain objects below them, in an order that ranks share."""
    from torch.distributed.tensor import DTensor

    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = list(values)[::-1]
    while todo:
        value = todo.pop()
        if isinstance(value, DTensor) or _on_one_rank(value):
            found.setdefault(id(value), value)
        elif id(value) not in seen:
            if isinstance(value, dict):
                inner: Iterable[Any] = value.values()
            elif isinstance(value, (list, tuple, deque)):
                inner = value
            elif type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
                inner = vars(value).values()
            else:
                continue
            seen.add(id(value))
            todo.extend(list(inner)[::-1])
    return list(found.values())


def _on_one_rank(value: Any) -> bool:
    """As views of weights do that a cell under pipeline has kept."""
    spots = sys.modules.get("nbtrain.strategies.kit.tensor_spots")
    return spots is not None and spots.is_stage_tensor(value)


def _pattern(names: list[str], identities: dict[str, list[int]]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(number, len(first)) for name in names for number in identities[name]]
