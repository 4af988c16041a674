"""Finds what changed in a local module since its file was executed.

`take` is called when Python has executed a file. Lists, dicts, instances, tensors and models below the module's names
are noted as the exchange notes what both sides have, so what was changed in them is found by the same walk.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Any

from nbtrain.base.errors import text_of
from nbtrain.exchange.gc_paused import gc_paused
from nbtrain.exchange.graph.find_changes import Walk
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds import dispatch, python_module_state
from nbtrain.exchange.kinds.base import ATOMS, MISSING, Compound, EditTwin, Node, Ref, keys_in, learn_atoms
from nbtrain.exchange.kinds.python_module_state import ModuleState

_INSIDE = frozenset((
    "list", "deque", "dict", "set", "bytearray", "instance", "module", "optimizer", "scheduler", "array", "tensor",
    "storage", "object array", "partial", "Counter", "defaultdict",
))  # fmt: skip
"""Kinds that are looked into; anything else is compared by identity."""
_LEARNING = frozenset(("module", "optimizer", "scheduler"))


class _Itself:
    """Stands for an object that is not looked into: equal where it is the same one."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return type(other) is _Itself and other.obj is self.obj

    def __hash__(self) -> int:
        return id(self.obj)


class _Inside(Walk):
    """A walk that does not open what only its own pickle method can move: that may take long, and do anything."""

    def encode(self, value: Any) -> Any:
        if type(value) not in ATOMS and self.table.find(value) is None:
            kind = dispatch.kind_of(value, self.namespace)
            if kind is None or not (kind.compound or kind.name in _INSIDE or kind.name.endswith(" with attributes")):
                return _Itself(value)
        return super().encode(value)


class ModuleObjects:
    """The objects that one execution of a file made."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.table = ObjectTable(0)
        walk = _Inside(self.table, {})
        for path, value in values.items():
            if type(value) not in ATOMS:
                walk.name(path, value)
        content = walk.finish()
        self.roots = {path: keys for path, value in content.names.items() if (keys := tuple(keys_in(value)))}
        """path → the objects in it that can be changed"""
        self.states = {record.key: record.state for record in content.records if type(record) is EditTwin}
        """of containers and instances; the content of arrays and tensors is not kept"""

    def nodes_by_place(self) -> Iterable[tuple[tuple[Any, ...], Node]]:
        """Each object with its place in the file; not the elements of sets, which have no order."""
        seen: set[int] = set()
        for path, keys in self.roots.items():
            ahead: list[tuple[tuple[Any, ...], Node]]
            ahead = [((path, index), self.table.nodes[key]) for index, key in enumerate(keys)]
            for place, node in ahead:
                if node.key in seen:
                    continue
                seen.add(node.key)
                yield place, node
                if not node.kind.name.startswith("set"):
                    below = [*(node.fixed or ()), *node.children]
                    ahead += [((*place, index), child) for index, child in enumerate(below)]

    def changed(self) -> set[int]:
        """Keys of the objects that differ from what the file made. Leaves no trace."""
        walk = _Inside(self.table, {})
        for path, keys in self.roots.items():
            for key in keys:
                walk.name(path, self.table.nodes[key].obj)
        try:
            records = walk.finish().records
            return {record.key for record in records} - {node.key for node in walk.added}
        finally:
            walk.undo()

    def learning(self) -> set[str]:
        nodes = self.table.nodes
        return {path for path, keys in self.roots.items() if any(nodes[key].kind.name in _LEARNING for key in keys)}

    def leading_to(self, changed: set[int]) -> set[str]:
        unreachable = self.table.unreachable
        return {path for path, keys in self.roots.items() if not changed <= set(unreachable(keys))}

    def put_back(self, changed: set[int]) -> bool:
        """Give these objects what the file gave them. False: it cannot be done for all of them."""
        complete = True
        for key in changed:
            node = self.table.nodes[key]
            try:  # the content of arrays and tensors was not kept
                # it stands in for the receiver: what kinds ask of one is below
                node.kind.put(node, self.states[key], self)  # type: ignore[arg-type]
                node.kind.look(node, _Inside(self.table, {}, quiet=True))
            except Exception:  # of a class of the user's; then the cell is told
                complete = False
        return complete

    def decode(self, value: Any) -> Any:
        """As `Receiver.decode` does, with the objects that are here."""
        if type(value) is Ref:
            return self.table.nodes[value.key].obj
        if type(value) is _Itself:
            return value.obj
        if type(value) is Compound:
            return dispatch.kind_named(value.kind).join(*map(self.decode, value.parts))
        return value


@gc_paused
def take(module: ModuleType, text: Any) -> None:
    """Note what a file made that has just been executed. Nothing of the user's fails because of it."""
    state = python_module_state.state_of(module.__name__)
    python_module_state.forget_places(state.name)
    state.text, state.base, state.made, state.places, state.stale = text, None, None, {}, False
    if state.module is not module:
        return
    with suppress(Exception):
        learn_atoms()
        values = state.values()
        state.made = ModuleObjects(values)
        for place, node in state.made.nodes_by_place():
            state.places[place] = node.obj
            python_module_state.note_place(node.kind.identity(node.obj), node.obj, (state.name, text, place))
        state.base = values


def taken_late(module: ModuleType, path: str, text: Any) -> None:
    """The same for a file that was executed before files were noted: its text says what numbers and strings were."""
    take(module, text)
    state = python_module_state.state_of(module.__name__)
    if state.base is None:
        return
    with suppress(OSError, SyntaxError, ValueError), open(path, "rb") as file:
        for name, value in _written(ast.parse(file.read()).body, ""):
            if name in state.base and type(state.base[name]) in ATOMS:
                state.base[name] = value


def _written(body: list[ast.stmt], prefix: str) -> Iterable[tuple[str, Any]]:
    """Names that exactly one statement assigns, with the value if it is a constant."""
    values_of: dict[str, list[Any]] = {}
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _written(statement.body, f"{prefix}{statement.name}.")
        for node in ast.walk(statement) if not isinstance(statement, (ast.ClassDef, ast.FunctionDef)) else ():
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                given = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
                plain = given.value if isinstance(given, ast.Constant) else MISSING
                values_of.setdefault(prefix + node.id, []).append(plain)
    yield from (
        (name, values[0]) for name, values in values_of.items() if len(values) == 1 and type(values[0]) in ATOMS
    )


def changes_since_execution(state: ModuleState) -> tuple[dict[str, Any], set[str], set[int]]:
    """What differs from what the file gave: values by path, paths that are gone, keys of objects that changed."""
    base = state.base
    assert base is not None
    now = state.values()
    same = python_module_state.same
    changed = {path: value for path, value in now.items() if path not in base or not same(value, base[path])}
    inside: set[int] = set()
    if state.made.roots:
        inside = state.made.changed()
        changed |= {path: now[path] for path in state.made.leading_to(inside) if path in now} if inside else {}
    return changed, base.keys() - now.keys(), inside


def used_by(values: Iterable[Any]) -> set[str]:
    """The modules that these values are, or come from."""
    names = (value.__name__ if type(value) is ModuleType else getattr(value, "__module__", None) for value in values)
    return {name for name in names if type(name) is str}


def look(
    table: ObjectTable, namespace: dict[str, Any], used: Iterable[str] = ()
) -> tuple[list[ModuleState], list[str]]:
    """The modules of which something travels; and a sentence for each thing that cannot, once.

    `used`: modules whose models and optimizers travel in any case, because a strategy has to set them up.
    """
    states: list[ModuleState] = []
    said: list[str] = []
    for state in python_module_state.states():
        began = time.perf_counter()
        changed, gone, _ = changes_since_execution(state)
        state.seconds = time.perf_counter() - began
        if state.name in used:
            state.shared |= state.made.learning()
        if not changed and not gone and not state.shared:
            continue
        state.shared |= gone
        for path, value in changed.items():
            if path not in state.shared and state.refused.get(path, said) is not value:
                reason = _refusal(path, value, table, namespace)
                if reason:
                    state.refused[path] = value
                    said.append(f"{state.name}.{path}, which its file did not set, stays where it is: {reason}")
                else:
                    state.refused.pop(path, None)
                    state.shared.add(path)
        now = state.values()
        state.entries = {path: now[path] for path in sorted(state.shared) if path in now}
        if state.shared:
            states.append(state)
    return states, said


def _refusal(path: str, value: Any, table: ObjectTable, namespace: dict[str, Any]) -> str:
    """Why a value cannot travel, or "". Nobody asked for it, so no cell fails because of it."""
    if type(value) in ATOMS or table.find(value) is not None:
        return ""
    walk = Walk(table, namespace)
    try:
        walk.name(path, value)
        walk.finish()
        if not walk.culprits:
            return ""
        from nbtrain.exchange.travel_check import path_of

        return "; ".join(f"{path_of(culprit)}: {culprit.reason}" for culprit in walk.culprits[:1])
    except Exception as error:  # of a class of the user's
        return f"looking at it raised {type(error).__name__}: {text_of(error)}"
    finally:
        walk.undo()


def restore() -> None:
    """Make local modules what their files gave, on a rank that forgets; or mark the file as to be executed again."""
    for state in python_module_state.states():
        changed, gone, inside = changes_since_execution(state)
        base = state.base or {}
        wanted = {path: base[path] for path in (*changed, *gone) if path in base}
        state.set(wanted, [path for path in changed if path not in base])
        if inside and not state.made.put_back(inside):
            state.stale = True
        state.forget()


def kept_over(state: ModuleState) -> dict[str, Any]:
    """What is set again after a file was executed again because its text changed."""
    return {path: value for path, value in changes_since_execution(state)[0].items() if path in state.shared}
