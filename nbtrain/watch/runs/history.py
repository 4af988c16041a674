"""`nbtrain.history()`: the runs that are kept, as a table and as data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any, overload

from nbtrain.base import tables
from nbtrain.base.errors import UsageError
from nbtrain.watch.runs import run_folder
from nbtrain.watch.runs.curves import RunCurves, draw
from nbtrain.watch.runs.read_run_file import newest_first, read_record
from nbtrain.watch.runs.run import HEAD, PANELS, WIDE, Measured, Run, frame


def history(all: bool = False) -> History:
    """The runs of this notebook, the oldest first; with `all` also those of the user's other notebooks."""
    runs = [Run(record) for record in newest_first(_any if all else _is_here)]
    return History(runs[::-1], everywhere=all)


def runs_from_newest() -> Iterator[Run]:
    """The runs of this notebook. Who needs only the last ones does not read the others."""
    return map(Run, newest_first(_is_here))


def numbered_run(number: int) -> Run | None:
    """The run of this notebook that has this number; no other file is opened."""
    where = run_folder.folder()
    record = read_record(number, run_folder.file(where, number), _is_here) if where is not None else None
    return None if record is None else Run(record)


def _any(settings: Mapping[str, Any]) -> bool:
    return True


def _is_here(settings: Mapping[str, Any]) -> bool:
    """Whether it is a run of this notebook, or of this kernel where the notebook's name is not known."""
    module = sys.modules.get("IPython.core.getipython")
    shell = module.get_ipython() if module is not None else None
    notebook = run_folder.notebook(shell.user_ns if shell is not None else {})
    return bool(settings["notebook"] == notebook if notebook else settings["kernel"] == run_folder.kernel())


class History(Measured):
    """Runs: `history()[12]` is run 12, `history()[-1]` the last one. `metrics`, `memory` and so on have the rows of
    all, with a column `run`."""

    _keys = ("run",)

    def __init__(self, runs: Sequence[Run], everywhere: bool = False) -> None:
        self._runs = list(runs)
        self._everywhere = everywhere

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __reversed__(self) -> Iterator[Run]:
        return reversed(self._runs)

    @overload
    def __getitem__(self, which: int) -> Run: ...
    @overload
    def __getitem__(self, which: slice) -> History: ...
    def __getitem__(self, which: int | slice) -> Run | History:
        if isinstance(which, slice):
            return History(self._runs[which], self._everywhere)
        if not self._runs:
            raise IndexError(self._nothing)
        if which < 0:
            return self._runs[which]
        chosen = next((run for run in self._runs if run.number == which), None)
        if chosen is None:
            there = ", ".join(str(run.number) for run in self._runs[-12:])
            raise IndexError(f"there is no run {which} here" + (f"; the last ones are {there}" if there else ""))
        return chosen

    @property
    def frame(self) -> Any:
        """The table as data, one row per run."""
        return frame([run.data() for run in self._runs], self._keys)

    def plot(self, *names: str, ax: Any = None) -> Any:
        """Compare runs: metrics by their names, `throughput` or `memory`, of each run's lowest rank."""
        if not names:
            names = tuple(dict.fromkeys(name for run in self._runs for name in run.names()))[:PANELS]
        if not names:
            raise UsageError("there is nothing to plot: these runs have logged nothing")
        return draw([self._compared(name) for name in names], ax)

    def __repr__(self) -> str:
        return tables.text(*self._table(), wide=WIDE) if self._runs else self._nothing

    def _repr_html_(self) -> str:
        return tables.STYLE + tables.html(*self._table()) if self._runs else f"<p>{escape(self._nothing)}</p>"

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [{"run": run.number, **row} for run in self._runs for row in run.rows(kind)]

    def _compared(self, name: str) -> RunCurves:
        if not self._runs:
            raise UsageError(self._nothing)
        with_curves = [(run, its_curves) for run in self._runs if (its_curves := run.curves(name)) is not None]
        if not with_curves or name == "phases":
            raise UsageError(f"none of these {len(self)} runs has anything called {name!r} that could be compared")
        curves = {
            f"run {run.number} {run.settings['strategy']}": next(iter(its_curves.curves.values()))
            for run, its_curves in with_curves
        }
        return replace(with_curves[0][1], curves=curves)

    def _table(self) -> tuple[tables.Row, list[tables.Row]]:
        if not self._everywhere:
            return HEAD, [run.row() for run in self._runs]
        books = [run.settings["notebook"].rpartition("/")[2] for run in self._runs]
        return (*HEAD, "notebook"), [(*run.row(), book) for run, book in zip(self._runs, books, strict=True)]

    @property
    def _nothing(self) -> str:
        if run_folder.folder() is None:
            return "no history is kept: NBTRAIN_HISTORY is off"
        if self._everywhere:
            return "no runs yet"
        return "no runs of this notebook yet; %distributed history all shows those of other notebooks"
