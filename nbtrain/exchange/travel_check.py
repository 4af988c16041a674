"""Names what cannot travel: its path, the line of the notebook that made it, the reason, and what to write instead.

Nothing here runs before something was refused.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import cloudpickle as cp

from nbtrain.exchange.cell_lines import CellLine, Cells
from nbtrain.exchange.graph.find_changes import Culprit
from nbtrain.exchange.graph.held_ids import INSTEAD
from nbtrain.exchange.graph.object_path import PathStep, steps_to
from nbtrain.exchange.kinds import dispatch
from nbtrain.exchange.kinds.base import Node
from nbtrain.exchange.kinds.objects import type_name
from nbtrain.exchange.kinds.remedies import instead

SEVERAL = 20
"""Culprits that are looked for inside one object that only its own pickle can move."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One object that cannot travel."""

    path: str
    type_name: str
    reason: str
    instead: str
    place: CellLine | None = None

    def __str__(self) -> str:
        kind = f" ({self.type_name})" if self.type_name else ""
        made = f"\n    made in  {self.place}" if self.place is not None else ""
        return f"{self.path}{kind} cannot travel to the ranks: {self.reason}{made}\n    instead  {self.instead}"


def told(findings: list[Finding], headline: str = "{} objects cannot travel, and nothing was sent:") -> str:
    """The text of findings; several are under a headline."""
    if len(findings) == 1:
        return str(findings[0])
    return "\n\n".join([headline.format(len(findings)), *map(str, findings)])


def findings(culprits: Iterable[Culprit], namespace: dict[str, Any], cells: Cells) -> list[Finding]:
    """One finding for each culprit, by the first way that leads to it."""
    every = list(culprits)
    # What is inside an object that only its own pickle can move is found by trying that pickle again.
    retried = {id(culprit.trail[-1]) for culprit in every if culprit.reason.endswith("inside it cannot")}
    by_path: dict[str, Finding] = {}
    for culprit in every:
        if len(culprit.trail) > 2 and id(culprit.trail[-2]) in retried:
            continue
        for segments, obj, reason in _inside(culprit, namespace):
            name = str(culprit.trail[0])
            path = name + "".join(map(str, segments))
            if path not in by_path:
                reason, _, other = reason.partition(INSTEAD)
                place = cells.place(name, segments)
                by_path[path] = Finding(path, type_name(obj), reason, other or instead(obj), place)
    return list(by_path.values())


def path_of(culprit: Culprit) -> str:
    """`odd.tricks['guard']`: from the name through everything that leads to the object."""
    return str(culprit.trail[0]) + "".join(map(str, _segments(culprit, None)))


def _segments(culprit: Culprit, namespace: dict[str, Any] | None) -> list[PathStep]:
    name, *chain = culprit.trail
    segments: list[PathStep] = []
    if namespace and name in namespace and chain and namespace[name] is not chain[0]:
        segments += steps_to(namespace[name], chain[0]) or []  # in a tuple
    for holder, child in pairwise(chain):
        kind = dispatch.kind_of(holder, {})
        segments += steps_to(holder, child, deep=kind is dispatch.kind_named("opaque")) or []
    return segments


def _inside(culprit: Culprit, namespace: dict[str, Any]) -> list[tuple[list[PathStep], Any, str]]:
    """The culprit, or what makes it one where only its own pickle knows."""
    outer = _segments(culprit, namespace)
    top = culprit.trail[-1]
    if dispatch.kind_of(top, namespace) is not dispatch.kind_named("opaque"):
        return [(outer, top, culprit.reason)]
    inner_ones: list[tuple[list[PathStep], Any, str]] = []
    skip: dict[int, Any] = {}
    while len(skip) < SEVERAL:
        probe = _Probe(top, namespace, skip)
        try:
            probe.dump(top)
        except Exception as error:  # any class may raise anything from its own pickle method
            at, reason = probe.at, str(error)
        else:
            break
        inner = steps_to(top, at, deep=True) if at is not top else []
        if at is top or id(at) in skip:
            break
        skip[id(at)] = at
        inner_ones.append(([*outer, *(inner or [])], at, reason))
    return inner_ones or [(outer, top, culprit.reason)]


class _Probe(cp.Pickler):
    """An object's own pickle once more, remembering which object it was at when it failed."""

    def __init__(self, top: Any, namespace: dict[str, Any], skip: dict[int, Any]) -> None:
        super().__init__(io.BytesIO(), protocol=5, buffer_callback=lambda buffer: False)
        self.top = self.at = top
        self.namespace = namespace
        self.skip = skip

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self.skip:
            return int, ()
        if obj is not self.top:
            kind = dispatch.kind_of(obj, self.namespace)
            if kind is not None and (kind.name in ("refused", "running frame")):
                self.at = obj
                kind.make_args(Node(0, obj, kind), None)  # type: ignore[arg-type]  # such a kind raises, whoever asks
            if kind is not None and (kind.lasting or kind.leaf):
                return int, ()  # a node of its own: the walk has looked at it
        self.at = obj
        return super().reducer_override(obj)
