"""Finds the names of the notebook that a cell needs and those that it may assign, without running anything.

    analyse(source)          what the text of a cell reads, writes and deletes
    reach(names, namespace)  those of its reads that the notebook has, and what their functions and classes read in turn

Names in strings given to `eval`, and functions beyond the first thousand elements of a container, are not seen.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from nbtrain.compat import namespaces, python
from nbtrain.exchange.gc_paused import gc_paused
from nbtrain.exchange.names.name_order import NameOrder
from nbtrain.exchange.names.object_globals import ObjectSearch
from nbtrain.exchange.names.read_before_bound import UNSEEN, NameFlow

_NONE: Mapping[str, int] = MappingProxyType({})
_PRIVATE = re.compile(rf"__\w*__|{namespaces.OF_IPYTHON}|{namespaces.OF_COMPILER}")
_SHOWN = re.compile(namespaces.KEPT_OF_CELLS)
_OF_THE_SHELL = {"get_ipython"}
_SHELL_GIVES = {"exit", "quit", "open"}


@dataclass(frozen=True, kw_only=True, slots=True)
class CellNames:
    """What the text of a cell says about names. Built-ins are among them: only the namespace knows what is shadowed."""

    reads: frozenset[str] = frozenset()
    """may be read before the cell has surely bound them"""
    writes: frozenset[str] = frozenset()
    """may be bound, by `global` in the cell's functions too"""
    deleted: frozenset[str] = frozenset()
    certain: Mapping[str, int] = field(default_factory=lambda: _NONE)
    """read whenever the cell runs from the top, and bound nowhere before → line of the first use"""
    shown: Mapping[str, int] = field(default_factory=lambda: _NONE)
    """the same of what IPython keeps of this notebook's cells: `_`, `Out`, `_12`"""
    opaque: bool = False
    """it can bind names that are not in its text (star import, `exec`, `%run`): do not judge what is missing"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """The names that have to travel, in the order of the namespace."""

    hard: tuple[str, ...] = ()
    """nobody else assigns them: when one cannot travel, the cell cannot run"""
    soft: tuple[str, ...] = ()
    """the cell may assign them before it reads them: when one cannot travel, it is left behind"""
    writes: frozenset[str] = frozenset()
    """what the cell, and the notebook's functions it can reach, may bind"""
    opaque: bool = False
    """as in CellNames, with the functions it can reach"""


def private(name: str) -> bool:
    """Whether a name never travels, because notebook and ranks have their own: dunder names, IPython's (`_`, `_i3`,
    `get_ipython`), and what torch.compile puts beside the code that it compiles."""
    return (name[:1] == "_" or name in _OF_THE_SHELL) and _PRIVATE.fullmatch(name) is not None


def of_ipython(name: str, namespace: Mapping[str, Any]) -> bool:
    """Whether `In` or `Out` is IPython's there: it may as well be a class that the notebook has defined."""
    other = namespaces.ALSO_AS.get(name)
    return other is not None and name in namespace and namespace[name] is namespace.get(other)


def own(namespace: Mapping[str, Any]) -> list[str]:
    """The names of a notebook or a rank that are the user's."""
    also = namespaces.ALSO_AS
    return [
        name for name in namespace
        if not (private(name) or (name in also and namespace[name] is namespace.get(also[name])))
    ]  # fmt: skip


@lru_cache(maxsize=256)
@gc_paused
def analyse(source: str) -> CellNames:
    """What the text of a cell does with names. `source`: the cell after IPython's transformation, so that magics are
    calls. SyntaxError as from `compile`."""
    flow = NameFlow()
    flow.block(ast.parse(source).body, frozenset())
    return CellNames(
        reads=_public(flow.reads),
        writes=_public(flow.writes),
        deleted=_public(flow.deleted),
        certain=MappingProxyType({name: line for name, line in flow.certain.items() if not private(name)}),
        shown=MappingProxyType({name: line for name, line in flow.certain.items() if _SHOWN.fullmatch(name)}),
        opaque=flow.opaque,
    )


@gc_paused
def reach(
    names: CellNames, namespace: dict[str, Any], *, values: Iterable[object] = (), places: NameOrder | None = None
) -> Captured:
    """The names that have to travel: those that the cell reads, and what their functions and classes read in turn.

    `values`: objects that are used beside the cell's text, such as the function given to `nbtrain.run`. `places`: the
    order of this namespace, kept from call to call by callers that ask often.
    """
    objects = ObjectSearch(namespace)
    # What the cell makes and deletes is sent too: a rank that never had it could not say that it is gone.
    asked = set(names.reads | names.deleted)
    for value in values:
        asked |= objects.reads(value)
    # what the cell assigns is set aside at first: its present value may never be used, nor what only that leads to
    hard = _follow(asked, names.writes, objects, namespace)
    every = hard | _follow(asked, hard, objects, namespace)
    ordered = (places or NameOrder(namespace)).ordered(every)
    return Captured(
        hard=tuple(name for name in ordered if name in hard),
        soft=tuple(name for name in ordered if name not in hard),
        writes=names.writes | _public(objects.writes),
        opaque=names.opaque or not UNSEEN.isdisjoint(asked),
    )


def _follow(asked: set[str], aside: Set[str], objects: ObjectSearch, namespace: dict[str, Any]) -> set[str]:
    """The names that `asked` leads to; what they read is added to it."""
    reached: set[str] = set()
    while ahead := {n for n in asked - reached - aside if n in namespace and not _given(n, namespace)}:
        reached |= ahead
        for name in ahead:
            asked |= objects.reads(namespace[name])
    return reached


def _given(name: str, namespace: Mapping[str, Any]) -> bool:
    """Whether IPython put the name there."""
    if private(name) or (name in namespaces.ALSO_AS and of_ipython(name, namespace)):
        return True
    if name not in _SHELL_GIVES:
        return False
    value = namespace[name]
    if name == "open":
        return getattr(value, "__wrapped__", value) in (builtins.open, io.open)
    return type(value).__module__.partition(".")[0] in {"IPython", "ipykernel", python.SITE_BUILTINS}


def _public(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name for name in names if not private(name))
