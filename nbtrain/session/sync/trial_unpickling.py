"""Objects that pack and do not unpack: tried in a copy of this process, because opening runs the classes' own code.

The copy shares the kernel's memory, so that no tensor is copied; what it changes, nobody else sees.
"""

from __future__ import annotations

import io
import os
import pickle
import select
import signal
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from nbtrain.awake_time import Patience
from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.graph.open_parcel import OpenedParcel
from nbtrain.exchange.kinds import numeric
from nbtrain.exchange.kinds.base import Node
from nbtrain.exchange.names.cell_names import CellNames, reach
from nbtrain.exchange.records import dump, load

PATIENCE = 20.0
"""Seconds that the copy has: a `__setstate__` may wait for a thread that exists in the kernel only."""
LOOK_UP = 0.1

_RUNS_CODE = ("__setstate__", "__new__", "__hash__", "__eq__", "__getattr__", "__getattribute__", "__init_subclass__",
              "__set_name__", "__setattr__")  # fmt: skip


def needed(added: Iterable[Node]) -> bool:
    """Whether anything but plain data is made over there. Weights, arrays and lists cannot fail to open."""
    return any(map(_may_fail, added))


def _may_fail(node: Node) -> bool:
    if node.kind.name in ("opaque", "stateful", "compiled"):
        return True
    if node.kind.name == "class":
        return type(node.obj) is not type or any(name in vars(node.obj) for name in _RUNS_CODE)
    cls: Any = type(node.obj)
    return node.kind.name == "instance" and cls.__new__ is not object.__new__


def tried(namespace: dict[str, Any], names: list[str]) -> list[tuple[str, str]]:
    """The names that could not be opened, and what was said."""
    if not hasattr(os, "fork"):
        return []
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of the kernel's threads; the copy needs none of them
        pid = os.fork()
    if pid == 0:
        _in_the_copy(theirs, namespace, names)
    os.close(theirs)
    try:
        said = _heard(ours)
    finally:
        os.close(ours)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if said is None:
        return []
    found: list[tuple[str, str]] = pickle.loads(said)
    return found


def _heard(pipe: int) -> bytes | None:
    """All that comes, or None when it did not come to an end."""
    data, patience = b"", Patience(PATIENCE)
    while True:
        ready, _, _ = select.select([pipe], [], [], LOOK_UP)
        if patience.over:
            return None
        if not ready:
            continue
        part = os.read(pipe, 1 << 16)
        if not part:
            return data or None
        data += part


def _in_the_copy(pipe: int, namespace: dict[str, Any], names: list[str]) -> None:
    """Never returns: nothing of the kernel's own end may run here."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        sys.stdout = sys.stderr = io.StringIO()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            torch.set_num_threads(1)  # the others did not come along
        os.write(pipe, pickle.dumps(_opened(namespace, names)))
    finally:
        os._exit(0)


def _opened(namespace: dict[str, Any], names: list[str]) -> list[tuple[str, str]]:
    warnings.simplefilter("ignore")
    try:
        _open(namespace, names)
    except Exception:  # which ones?
        pass
    else:
        return []
    said: dict[str, str] = {}
    for name in names:
        needs = reach(CellNames(reads=frozenset({name})), namespace).hard
        try:
            _open(namespace, [one for one in names if one in needs])
        except Exception as error:  # a class may raise anything
            said.setdefault(str(error), name)
    return [(name, text) for text, name in said.items()]


def _open(namespace: dict[str, Any], names: list[str]) -> None:
    numeric.learn_atoms()
    walk = Walk(ObjectTable(0), namespace)
    for name in names:
        walk.name(name, namespace[name])
    cargo = walk.finish()
    if walk.culprits:
        return  # it is said elsewhere
    there: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    buffers: list[Any] = cargo.buffers
    arrival = OpenedParcel(ObjectTable(-1, -1), there, load(dump(cargo)), buffers.__getitem__, lambda kind: "cpu")
    arrival.commit()
