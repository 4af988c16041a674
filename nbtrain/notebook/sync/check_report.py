"""`%distributed check`: whether names of the notebook can travel, and what would be sent. Sends and changes nothing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import nbtrain.base.humanize as humanize
from nbtrain.base.errors import UsageError, text_of
from nbtrain.exchange.cell_lines import Cells
from nbtrain.exchange.graph.find_changes import Culprit, Walk
from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.kinds.base import ATOMS, Node, ParcelContent, learn_atoms
from nbtrain.exchange.names.cell_names import CellNames, own, reach
from nbtrain.exchange.parcel import dump
from nbtrain.exchange.travel_check import Finding, findings, path_of, told, type_name
from nbtrain.notebook.sync import unpickle_check
from nbtrain.notebook.sync.notebook_side import NotebookSide

HEAVY = 16 << 20
"""Bytes from which on it is worth a line that nobody asked for them."""
SHOWN = 6
OWN = (
    "each process's own, and not sent: what IPython keeps of cells (Out, In, _), exit, __annotations__, numbers of "
    "threads, handlers of loggers, what was set in installed packages by hand"
)


@dataclass(slots=True)
class CheckReport:
    """True when everything can travel; shown as text."""

    findings: list[Finding] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """bytes that would be sent for each name"""
    resident: list[str] = field(default_factory=list)
    """unchanged on the ranks already"""
    by_name: list[str] = field(default_factory=list)
    """modules, and what else is imported there"""
    warnings: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.findings

    def __repr__(self) -> str:
        refused = [told(self.findings, "{} objects cannot travel:") + "\n"] if self.findings else []
        return "\n".join([*refused, self._rest(), *self.warnings]).strip()

    def _rest(self) -> str:
        count = len(self.sizes) + len(self.resident) + len(self.by_name)
        if not count:
            return "" if self.findings else "there is nothing to send"
        parts = []
        if self.sizes:
            largest = sorted(self.sizes, key=lambda name: -self.sizes[name])
            total = sum(self.sizes.values())
            worth = [name for name in largest[:SHOWN] if self.sizes[name] >= total / 100] or largest[:1]
            listed = [f"{name} {humanize.size(self.sizes[name])}" for name in worth]
            if more := largest[len(worth) :]:
                listed.append(f"{len(more)} more {humanize.size(sum(self.sizes[name] for name in more))}")
            parts.append(f"{humanize.size(total)} would be sent: {', '.join(listed)}")
        if self.resident:
            parts.append(f"on the ranks already: {humanize.listed(self.resident, 2 * SHOWN)}")
        if self.by_name:
            parts.append(f"by name: {humanize.listed(self.by_name, 2 * SHOWN)}")
        head = "the rest can travel" if self.findings else "everything can travel"
        return " · ".join([head, *parts])


def check(
    namespace: dict[str, Any], traffic: NotebookSide | None, numbers: Mapping[str, int], asked: list[str]
) -> CheckReport:
    """`asked`: names; none means every name that a cell could read."""
    for name in asked:
        if name not in namespace:
            close = difflib.get_close_matches(name, own(namespace), 1)
            raise UsageError(f"the notebook has no {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    learn_atoms()
    names = CellNames(reads=frozenset(asked or own(namespace)))
    wanted = [name for name in reach(names, namespace).hard if not _ours(namespace[name])]
    cells = Cells(numbers)
    looked = _CheckWalk(namespace, traffic, wanted)
    try:
        report = looked.report
        report.findings = [*findings(looked.walk.culprits, namespace, cells), *looked.broken]
        able = [name for name in wanted if not any(_below(finding.path, name) for finding in report.findings)]
        looked.walk.content.buffers.clear()  # of what is on a device they are copies
        report.findings += findings(unpickle_check.cannot_open(namespace, able, looked.walk), namespace, cells)
        refused = {finding.path for finding in report.findings}
        for name in [name for name in report.sizes if any(_below(path, name) for path in refused)]:
            del report.sizes[name]
        report.warnings = [*_views(looked.walk), *_dragged(report, asked, namespace)]
        if not asked:
            report.warnings.append(OWN)
        return report
    finally:
        looked.walk.undo()


class _CheckWalk:
    """The walk that a cell would make, its result taken apart by names."""

    def __init__(self, namespace: dict[str, Any], traffic: NotebookSide | None, wanted: list[str]) -> None:
        self.report = CheckReport()
        self.broken: list[Finding] = []
        able = list(wanted)
        while True:
            self.walk = Walk(traffic.table if traffic is not None else ObjectTable(0), namespace)
            self.report = CheckReport()
            failed = self._names(namespace, able)
            if failed is None:
                return
            able.remove(failed)

    def _names(self, namespace: dict[str, Any], names: Iterable[str]) -> str | None:
        """The name at which something raised what no kind expected: the walk starts again without it."""
        walk = self.walk
        for name in names:
            value = namespace[name]
            if isinstance(value, ModuleType):
                self.report.by_name.append(name)
                continue
            known = walk.table.find(value) is not None
            records, buffers, culprits = len(walk.content.records), len(walk.content.buffers), len(walk.culprits)
            try:
                walk.name(name, value)
                part = ParcelContent(walk.content.records[records:], [], {name: walk.content.names[name]})
                stream = 0 if len(walk.culprits) > culprits else len(dump(part))
            except Exception as error:  # whatever a class does when it is looked at or packed
                walk.undo()
                reason = f"{type(error).__name__}: {text_of(error)}"
                self.broken.append(Finding(name, type_name(value), reason, "make it inside the cell"))
                return name
            size = sum(data.nbytes for data in walk.content.buffers[buffers:])
            if known and not part.records:
                self.report.resident.append(name)
            elif type(value) not in ATOMS and walk.content.names[name] is value and len(walk.culprits) == culprits:
                self.report.by_name.append(name)
            elif len(walk.culprits) == culprits:
                self.report.sizes[name] = size + stream
        walk.finish()
        return None


def _below(path: str, name: str) -> bool:
    return path.startswith(name) and not path[len(name) : len(name) + 1].isidentifier()


def _ours(value: Any) -> bool:
    """What `from nbtrain import …` binds is there on every rank."""
    return isinstance(value, ModuleType) and value.__name__ == "nbtrain"


def _views(walk: Walk) -> Iterable[str]:
    """Small windows on large memory: all of the memory travels, because others may show it too."""
    shown: dict[int, list[Node]] = {}
    for node in walk.added:
        if node.kind.name in ("tensor", "array"):
            for owner in node.fixed or ():
                shown.setdefault(owner.key, []).append(node)
    for key, views in shown.items():
        owner = walk.table.nodes[key]
        total = owner.obj.nbytes() if callable(owner.obj.nbytes) else owner.obj.nbytes
        held_itself = owner.kind.name == "array" and owner.via not in views
        used = sum(view.obj.nbytes for view in views)
        if held_itself or total - used < HEAVY or used > total / 2:
            continue
        trail = walk.trail(views[0].via)
        path = path_of(Culprit(views[0].obj, "", [*trail, views[0].obj]))
        copy = "clone()" if views[0].kind.name == "tensor" else "copy()"
        yield (
            f"{path} shows {humanize.size(used)} of {humanize.size(total)} of memory, and all of it travels: "
            f"{path} = {path}.{copy} sends what is shown"
        )


def _dragged(report: CheckReport, asked: list[str], namespace: dict[str, Any]) -> Iterable[str]:
    """Names that nobody asked for and that functions read."""
    for name, size in report.sizes.items():
        if not asked or name in asked or size < HEAVY:
            continue
        for other in asked:
            if name in reach(CellNames(reads=frozenset({other})), namespace).hard:
                yield f"{other} reads {name}, so {humanize.size(size)} come along: give it what it needs as an argument"
                break
