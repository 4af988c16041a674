"""Finds objects that pickle and do not unpickle, in a scratch process, because unpickling runs the classes' own code.

Large buffers go without their numbers. What fails so is opened again with them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from nbtrain.engines._local import scratch
from nbtrain.exchange import python_module_baseline
from nbtrain.exchange.graph.find_changes import Culprit, Walk
from nbtrain.exchange.graph.held_ids import INSTEAD
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds.base import Node, ParcelContent, keys_in
from nbtrain.exchange.kinds.python_module_state import MODULE, states
from nbtrain.exchange.names.cell_names import CellNames, reach
from nbtrain.exchange.parcel import Packer
from nbtrain.notebook.sync.kernel_environment import SentEnvironment
from nbtrain.worker.process.scratch_job import open_parcel

PATIENCE = 20.0
"""Seconds for opening: a `__setstate__` may wait for a thread that exists in the kernel only."""

_RUNS_CODE = ("__setstate__", "__new__", "__hash__", "__eq__", "__getattr__", "__getattribute__", "__init_subclass__",
              "__set_name__", "__setattr__")  # fmt: skip


def _may_fail(node: Node) -> bool:
    if node.kind.name in ("opaque", "stateful", "compiled"):
        return True
    if node.kind.name == "class":
        return type(node.obj) is not type or any(name in vars(node.obj) for name in _RUNS_CODE)
    cls: Any = type(node.obj)
    return node.kind.name == "instance" and cls.__new__ is not object.__new__


def cannot_open(namespace: dict[str, Any], names: list[str], walk: Walk) -> list[Culprit]:
    """What could not be opened. `walk`: the one that looked at these names."""

    def needed(by: Iterable[str]) -> list[str]:
        needs = reach(CellNames(reads=frozenset(by)), namespace).hard
        return [name for name in names if name in needs]

    may_fail = _doubtful(walk)
    failing = [name for name in names if name in may_fail]
    if not failing or _culprit(namespace, needed(failing), numbers=False) is None:
        return []
    found = []
    for name in failing:  # which ones?
        read = sorted(needed([name]), key=lambda one: one != name)
        if _culprit(namespace, read, numbers=False) and (culprit := _culprit(namespace, read, numbers=True)):
            found.append(culprit)
    return found


def _doubtful(walk: Walk) -> set[str]:
    """The names that lead to anything but plain data: weights, arrays and lists cannot fail to open."""
    holders: dict[int, list[int]] = {}
    for node in walk.table.nodes.values():
        for child in (*node.children, *(node.fixed or ())):
            holders.setdefault(child.key, []).append(node.key)
    doubtful: set[int] = set()
    todo = [node.key for node in walk.added if _may_fail(node)]
    while todo:
        if (key := todo.pop()) not in doubtful:
            doubtful.add(key)
            todo += holders.get(key, ())
    return {name for name, value in walk.content.names.items() if not doubtful.isdisjoint(keys_in(value))}


def _culprit(namespace: dict[str, Any], names: list[str], numbers: bool) -> Culprit | None:
    """What could not be opened. None: all of it could, or nobody answered."""
    packer, walk = Packer(tempfile.gettempdir(), numbers=numbers), Walk(ObjectTable(0), namespace)
    try:
        parcel = packer.pack(_content(walk, names), (0,))
        environment = SentEnvironment(SimpleNamespace(colors=None)).changes(False)
        said = scratch.ask(open_parcel, parcel, environment, PATIENCE, _takes_long)
    finally:
        packer.close()
    if said is None:
        return None
    key, why, other = said
    trail = [names[0], namespace[names[0]]] if key is None else walk.trail(walk.table.nodes[key])
    return Culprit(trail[-1], f"packed, but not made again: {why}{INSTEAD}{other}", trail)


def _content(walk: Walk, names: list[str]) -> ParcelContent:
    """As a cell would send it. What cannot travel is said elsewhere."""
    namespace = walk.namespace
    for name in names:
        walk.name(name, namespace[name])
    refused = {state.name: dict(state.refused) for state in states()}
    used = python_module_baseline.used_by(namespace[name] for name in names)
    modules, _ = python_module_baseline.look(walk.table, namespace, used)
    for state in states():
        state.refused = refused.get(state.name, {})  # it is said when the next cell is sent
    for state in modules:
        walk.name(MODULE + state.name, state)
    content = walk.finish()
    return ParcelContent() if walk.culprits else content


def _takes_long() -> None:
    print("trying in another process whether all of it can be made again on a rank …", flush=True)
