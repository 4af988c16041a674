"""What a run has changed and made, on the disk: whole objects, which any notebook can open.

Buffers lie in a file of their own, which is mapped and not read: weights are not in memory twice.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.graph.open_parcel import OpenedParcel, Unmakeable, refs
from nbtrain.exchange.kinds.base import Later, MakeTwin, ParcelContent, learn_atoms
from nbtrain.exchange.kinds.dispatch import kind_named
from nbtrain.exchange.parcel import ALIGN, BufferPlace, Opener, Parcel, dump

OBJECTS, BUFFERS = "result", "result.data"


def write(folder: Path, namespace: dict[str, Any], names: Iterable[str], same: Iterable[str] = ()) -> dict[str, Any]:
    """Write these names together, as one may hold what another is, and of `same`, which the run has not changed, those
    that hold something of it: what is one object here is one at home. Returns which those are, and which names are
    `left`, and why."""
    learn_atoms()
    wanted, others = list(names), list(same)
    left: dict[str, str] = {}
    while True:
        walk = Walk(ObjectTable(0), namespace)
        for name in wanted:
            walk.name(name, namespace[name])
        content = walk.finish()
        if bad := {str(culprit.trail[0]): culprit.reason for culprit in reversed(walk.culprits)}:
            left.update(bad)
            wanted = [name for name in wanted if name not in bad]
            continue
        here = _objects(walk)
        rest = [name for name in others if name not in wanted and name not in left]
        more = [name for name in rest if not here.isdisjoint(_below_name(name, namespace))]
        if not more:
            break
        wanted += more
    _write(folder, content)
    return {
        "left": {name: why for name, why in left.items() if name not in others},
        "same": [name for name in others if name in wanted],
    }


def _below_name(name: str, namespace: dict[str, Any]) -> set[int]:
    walk = Walk(ObjectTable(0), namespace)
    walk.name(name, namespace[name])
    return _objects(walk)


def _objects(walk: Walk) -> set[int]:
    """Of what can be edited, so that it matters which one it is."""
    return {
        id(node.obj) for node in walk.table.nodes.values()
        if not node.kind.constant and not isinstance(node.obj, type | FunctionType)
    }  # fmt: skip


def _write(folder: Path, content: ParcelContent) -> None:
    places, at = [], 0
    new = folder / f".{BUFFERS}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        for buffer in content.buffers:
            data = buffer.fetch() if isinstance(buffer, Later) else buffer
            file.seek(at)
            file.write(data)
            places.append(BufferPlace(1, at, data.nbytes))
            at += -(-data.nbytes // ALIGN) * ALIGN
        file.truncate(max(at, 1))
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, folder / BUFFERS)
    parcel = Parcel(dump(content), b"", tuple(places), {1: (str(folder / BUFFERS), max(at, 1))})
    new = folder / f".{OBJECTS}"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
        pickle.dump(parcel, file, 5)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, folder / OBJECTS)


def read(folder: Path, namespace: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """All of it as new objects, and nothing of the notebook's is touched: (name → object, name → why it cannot be made
    here). `namespace`: the notebook's, by whose classes objects are made."""
    learn_atoms()
    with open(os.open(folder / OBJECTS, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        parcel: Parcel = pickle.load(file)
    left: dict[str, str] = {}
    while True:
        content, buffer = Opener().open(parcel)
        content, table = without(content, left), ObjectTable(0)
        _use_own_classes(content, namespace, table)
        try:
            arrival = OpenedParcel(table, dict(namespace), content, buffer, _place, lenient=True)
            arrival.commit()
        except Unmakeable as error:
            names = reaching(content, error.key)
            if not names:
                raise
            left.update(dict.fromkeys(names, error.reason))
        else:
            return dict(arrival.names), left


def _use_own_classes(content: ParcelContent, namespace: Mapping[str, Any], table: ObjectTable) -> None:
    """Objects are of the notebook's classes, where it has some of these names."""
    kind = kind_named("class")
    for record in content.records:
        if isinstance(record, MakeTwin) and record.kind == kind.name:
            is_enum, _, rest = record.args
            own = namespace.get(rest[0] if is_enum else rest[1])
            if isinstance(own, type):
                table.add(record.key, own, kind)
    content.records[:] = [record for record in content.records if record.key not in table.nodes]


def without(content: ParcelContent, left: Iterable[str]) -> ParcelContent:
    """Only what the other names lead to."""
    if not left:
        return content
    names = {name: value for name, value in content.names.items() if name not in set(left)}
    keep = {key for name in names for key in _below(content, name)}
    return ParcelContent([record for record in content.records if record.key in keep], [], names)


def reaching(content: ParcelContent, key: int) -> list[str]:
    """The names that lead to this object."""
    return [name for name in content.names if key in _below(content, name)]


def _below(content: ParcelContent, name: str) -> set[int]:
    holds: dict[int, set[int]] = {}
    for record in content.records:
        inside = (getattr(record, "args", None), getattr(record, "state", None))
        holds.setdefault(record.key, set()).update(refs(inside))
    keys, todo = set(), [*refs(content.names[name])]
    while todo:
        if (key := todo.pop()) not in keys:
            keys.add(key)
            todo += holds.get(key, ())
    return keys


def _place(kind: str) -> str:
    """Tensors of a card come to the CPU where this process uses none."""
    torch: Any = sys.modules.get("torch")
    return kind if kind != "cuda" or (torch is not None and torch.cuda.is_initialized()) else "cpu"
