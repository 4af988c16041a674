"""Reports on a cell when it is over, below its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import nbtrain.humanize as humanize
from nbtrain.errors import UsageError
from nbtrain.events import GROUP, Finished
from nbtrain.session.cell import Cell
from nbtrain.session.report.loop_variables import loop_variables
from nbtrain.session.report.same_work_report import compared
from nbtrain.session.sync.kept_handles import kept
from nbtrain.session.sync.notebook_side import NotebookSide

SHOWN = 8
"""Names in one line."""


class Reporter:
    """Says sentences about a cell, some of them only once."""

    def __init__(self, say: Callable[[str], object], known: set[tuple[str, str]], cell: Cell | None = None) -> None:
        """`known`: what was said already, as (text of a cell, or nothing, and the name of the sentence)."""
        self.say, self._known, self._cell = say, known, cell

    def once(self, name: str, sentence: str, of_this_cell: bool) -> None:
        key = self._cell.source if self._cell is not None and of_this_cell else "", name
        if key not in self._known:
            self._known.add(key)
            self.say(sentence)

    def worth_saying(self, names: Iterable[str]) -> list[str]:
        """The names without loop variables, which hold each rank's last batch."""
        passing = loop_variables(self._cell.code) if self._cell is not None else frozenset()
        return [name for name in names if name not in passing]


OWN_RATES = (
    "{groups}: not the same on rank {ranks} as on rank {lead}, so that their steps leave different weights; rank "
    "{lead}'s came home. Was it set from a loss? That is each rank's own: `reduce(loss.item())` is one number for all"
)


def report(side: NotebookSide, finished: Mapping[int, Finished], lead: int, said: Reporter) -> None:
    """Report on a cell that came home. What differs between ranks is sent again from the notebook."""
    done, say = finished[lead], said.say
    for note in done.notes:
        say(note)
    for name, sentence in compared(finished.values()).items():
        said.once(name, sentence, of_this_cell=True)
    for name, sentence in done.advice.items():
        said.once(name, sentence, of_this_cell=False)
    for path, reason, known in done.home.stayed:
        if known:
            say(f"{path}: what changed in it stays on the ranks, the notebook's is as it was: {reason}")
        else:
            say(f"{path} stays on the ranks, the notebook has a handle for it: {reason}")
    for reason in side.unchanged:
        say(f"{reason}; the notebook's is not changed")
    if differing := _differing(finished):
        side.differs(differing)
        if names := said.worth_saying(differing):
            say(f"differ between ranks: {listed(names)}; the notebook has rank {lead}'s")
    if disagreements := _disagreements(finished, lead):
        say("\n".join(disagreements))
        side.resend()


def report_lost(side: NotebookSide | None, namespace: Mapping[str, Any]) -> None:
    """Say what is lost because the ranks end."""
    if side is not None and (lost := kept(side.table, namespace)):
        print(f"{listed(lost)}: lived on these ranks only, which are ended; to be made again")
    drop_ahead(side)


def report_partly_lost(side: NotebookSide, namespace: Mapping[str, Any], ranks: Iterable[int]) -> None:
    """Say what is lost because these ranks end, while the others live on."""
    if held := kept(side.table, namespace):
        first = next(iter(held))
        said = (
            f"{humanize.ranks(sorted(ranks))}'s is gone; bring home what the others have with {first} = {first}.pull()"
        )
        print(f"{listed(held)}: {said}")


def drop_ahead(side: NotebookSide | None) -> None:
    """Drop what --keep left on the ranks: they get the notebook's objects again."""
    if side is not None and side.ahead:
        names = listed(sorted(side.ahead))
        print(f"{names}: what --keep had left on the ranks is dropped; the notebook's is as it was")
        side.ahead.clear()


def check_ahead(side: NotebookSide, parted_as: tuple[Any, ...]) -> None:
    """Raises where other options would drop what --keep left on the ranks."""
    if side.ahead:
        strategy, options, precision = parted_as
        given = f" {humanize.flags(options)}".rstrip() + (f" --precision {precision}" if precision != "32" else "")
        names = listed(sorted(side.ahead))
        raise UsageError(
            f"{names}: what --keep has left on the ranks is in pieces for -s {strategy}{given}. Bring it home with "
            f"a cell under the same options that reads {names}, or let it go with %distributed stop"
        )


def slow(name: str, value: Any, seconds: float) -> str:
    return (
        f"looking for changes in {name}, a {type(value).__name__} of {len(value):,}, took {seconds:.1f} s, and does so "
        "before each cell that reads it; an array, a tensor or a tuple of the same costs next to nothing"
    )


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more


def _differing(finished: Mapping[int, Finished]) -> list[str]:
    """Names that differ between ranks."""
    values = [dict(done.values) for done in finished.values() if done.values is not None]
    if len(values) < 2:
        return []
    names = dict.fromkeys(name for found in values for name in found)
    return [name for name in names if len({found.get(name) for found in values}) > 1]


def _disagreements(finished: Mapping[int, Finished], lead: int) -> list[str]:
    """Sentences about what should be equal on all ranks and is not. The others get the lead's with the next cell."""
    expected = dict(finished[lead].replica_checksums or ())
    differing: dict[str, list[int]] = {}
    for rank, done in finished.items():
        for name, number in done.replica_checksums or ():
            if expected.get(name, number) != number:
                differing.setdefault(name, []).append(rank)
    if groups := [name for name in differing if GROUP in name]:  # the reason for all the others
        ranks = sorted({rank for name in groups for rank in differing[name]})
        return [OWN_RATES.format(groups=listed(groups), ranks=", ".join(map(str, ranks)), lead=lead)]
    return [
        f"rank {', '.join(map(str, ranks))} differs from rank {lead} in {name}; rank {lead}'s came home"
        for name, ranks in differing.items()
    ]
