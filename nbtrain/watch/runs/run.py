"""One run of the history: what it was, what it logged and measured, how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from html import escape
from typing import Any

from nbtrain.base import humanize, tables
from nbtrain.base.errors import UsageError
from nbtrain.base.events import PHASES
from nbtrain.base.humanize import quantity
from nbtrain.watch.runs.curves import MEASURED, RunCurves, columns, draw, logged, picture, read_curves, throughput
from nbtrain.watch.runs.read_run_file import RunRecord
from nbtrain.watch.runs.run_rows import METRICS
from nbtrain.watch.runs.thinning import Row
from nbtrain.watch.views.base import duration, metric

HEAD: tables.Row = (
    "run", "when", "cell", "strategy", "ranks", "steps", "last metrics", "samples/s", "memory, peak", "took", "ended",
)  # fmt: skip
LAST, PANELS = 4, 6
"""metrics in a line of the table, and in a picture for which none is named"""
WIDE = 28
"""characters of a column"""


class Measured:
    """What runs have measured: DataFrames where pandas is installed, else lists of dicts."""

    _keys: tuple[str, ...] = ()
    """columns that name the run of a row"""

    def rows(self, kind: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    @property
    def metrics(self) -> Any:
        """What was logged, one row for each rank and step."""
        return self._frame("metrics")

    @property
    def memory(self) -> Any:
        """Bytes: of the process, and what torch has allocated and reserved on its device."""
        return self._frame("memory")

    @property
    def throughput(self) -> Any:
        """Steps and samples since the cell began, and how many a second lately."""
        return self._frame("throughput")

    @property
    def phases(self) -> Any:
        """Seconds that were spent in each phase of a step since the cell began."""
        return self._frame("phases")

    @property
    def use(self) -> Any:
        """Cores that each process kept busy, and the part of its GPU."""
        return self._frame("use")

    def _frame(self, kind: str) -> Any:
        return frame(self.rows(kind), (*self._keys, *columns(kind)))


class Run(Measured):
    """One run."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self.number = record.number
        self.settings = record.settings
        """its options, and the environment that it ran in"""
        self.began = datetime.fromtimestamp(record.settings["began"])

    @property
    def figures(self) -> dict[str, Any]:
        """Its totals: steps, samples, rates, peak memory; and `last`, the mean of each metric over the ranks."""
        return self._record.figures

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return self._record.seconds

    @property
    def how(self) -> str:
        """done, stopped, killed, failed, running or lost."""
        return self._record.how

    @property
    def ended(self) -> str:
        """done, stopped, killed, failed and why, running, or lost: its kernel died, at about this time."""
        how, text = self._record.how, self._record.text
        if how == "lost":
            return f"lost at {_when(self.settings['began'] + self.seconds, '%H:%M:%S')}"
        return f"{how}: {text}" if text else how

    def plot(self, *names: str, ax: Any = None) -> Any:
        """Metrics by their names, `throughput`, `memory` or `phases`; without names, all metrics."""
        wanted = names or self.names()
        if not wanted:
            raise UsageError(f"run {self.number} logged nothing and was too short to measure")
        return draw([self._plotted(name) for name in wanted], ax)

    def __repr__(self) -> str:
        lines = [f"run {self.number}: {self._title}", *(f"  {left:<10}{right}" for left, right in self._lines())]
        head, *rows = self._summary()
        return "\n".join([*lines, *(["", tables.text(head, rows)] if rows else [])])

    def _repr_html_(self) -> str:
        lines = "".join(f"<tr><td>{escape(left)}</td><td>{escape(right)}</td></tr>" for left, right in self._lines())
        head, *rows = self._summary()
        there = [curves for name in self.names() if (curves := self.curves(name))]
        return (
            f"{tables.STYLE}<p><strong>run {self.number}</strong> {escape(self._title)}</p>"
            f'<table class="nbt-table"><tbody>{lines}</tbody></table>'
            f"{tables.html(head, rows) if rows else ''}{picture(there) if there else ''}"
        )

    def rows(self, kind: str) -> list[dict[str, Any]]:
        if kind == "metrics":
            return self._record.metrics()
        return throughput(self._record) if kind == "throughput" else self._record.table(kind)

    def logged_rows(self) -> Iterator[tuple[int, str, list[Row]]]:
        """(rank, name, (step, value) pairs) of what it logged, in the order in which it was written."""
        return self._record.rows(METRICS)

    @property
    def _title(self) -> str:
        said = self.settings.get("summary") or ""
        return said or " · ".join(filter(None, [self._strategy, self._ranks, *self.settings.get("notes", ())]))

    @property
    def _strategy(self) -> str:
        """With its options, as they are typed."""
        settings = self.settings
        precision = "" if settings["precision"] == "32" else settings["precision"]
        return " ".join(filter(None, [settings["strategy"], humanize.flags(settings["options"]), precision]))

    @property
    def _ranks(self) -> str:
        devices, count = self.settings["devices"], self.settings["world_size"]
        few = list(dict.fromkeys(devices))
        return f"{len(devices)} × {few[0]}" if len(few) == 1 else f"{count}: {', '.join(few)}"

    @property
    def _cell(self) -> str:
        number, source = self.settings["cell"], self.settings["source"]
        return source if number is None else f"[{number}] {source}"

    def row(self) -> tables.Row:
        """Its row in the history's table."""
        figures = self.figures
        last = [f"{name} {metric(value)}" for name, value in figures["last"].items()]
        more = [f"and {len(last) - LAST} more"] if len(last) > LAST else []
        rate, peak = figures["samples_per_second"], figures["peak_memory"]
        return (
            str(self.number), _when(self.settings["began"], "%H:%M"), _cut(self._cell, 2 * WIDE), self._strategy,
            self._ranks, f"{figures['steps']:,}" if figures["steps"] else "", ", ".join(last[:LAST] + more),
            quantity(rate) if rate else "", humanize.size(peak) if peak else "", _took(self.seconds), self.ended,
        )  # fmt: skip

    def data(self) -> dict[str, Any]:
        """Its row as data."""
        settings, figures = self.settings, self.figures
        names = ("notebook", "cell", "source", "strategy", "precision", "world_size")
        numbers = ("steps", "samples", "samples_per_second", "steps_per_second", "peak_memory")
        columns = {
            "run": self.number, "began": self.began, **{name: settings[name] for name in names},
            **{name: figures[name] for name in numbers}, "seconds": self.seconds, "ended": self.ended,
        }  # fmt: skip
        return columns | {f"{name}_" if name in columns else name: value for name, value in figures["last"].items()}

    def _lines(self) -> Iterator[tuple[str, str]]:
        settings, figures = self.settings, self.figures
        yield "when", f"{self.began:%d %b %Y %H:%M:%S}, {_took(self.seconds)}, {self.ended}"
        if settings["notebook"]:
            yield "notebook", settings["notebook"]
        yield "cell", self._cell
        if settings["asked"]:
            yield "options", humanize.flags(settings["asked"])
        yield "versions", ", ".join(f"{name} {version}" for name, version in settings["versions"].items() if version)
        if figures["steps"]:
            rates = (("samples/s", figures["samples_per_second"]), ("steps/s", figures["steps_per_second"]))
            said = [f"{quantity(rate)} {unit}" for unit, rate in rates if rate]
            yield "steps", ", ".join([f"{figures['steps']:,}", *said])
        if spent := self._spent():
            yield "a step", spent
        if figures["peak_memory"]:
            yield "memory", f"{humanize.size(figures['peak_memory'])} at most, of one rank"
        there, logged = self._record.kept
        if there < logged:
            yield "logged", f"{logged:,} values; {there:,} are kept, the lowest and highest of neighbours among them"

    def _spent(self) -> str:
        """What a step was made of, on the lowest rank."""
        rows = self._record.table("phases")
        last = [row for row in rows if row["rank"] == rows[0]["rank"]][-1:]
        if not last or not last[0]["steps"]:
            return ""
        spent = [(phase, 1000 * last[0][phase] / last[0]["steps"]) for phase in PHASES]
        return ", ".join(f"{phase} {quantity(ms)} ms" for phase, ms in spent if ms >= 0.005)

    def _summary(self) -> list[tables.Row]:
        """A table of its metrics, over all ranks."""
        table: list[tables.Row] = [("metric", "first", "lowest", "highest", "last")]
        for name in logged(self._record):
            ys = [y for _, points in self._plotted(name).curves.values() for y in points]
            last = self.figures["last"].get(name, ys[-1])
            finite = [y for y in ys if y == y] or ys
            table.append((name, *map(metric, (ys[0], min(finite), max(finite), last))))
        return table

    def names(self) -> list[str]:
        """What is plotted by default."""
        metrics = logged(self._record)[:PANELS]
        return metrics or [name for name in MEASURED[:2] if self.curves(name)]

    def curves(self, name: str) -> RunCurves | None:
        return read_curves(self._record, name)

    def _plotted(self, name: str) -> RunCurves:
        curves = self.curves(name)
        if curves is None:
            there = [known for known in (*logged(self._record), *MEASURED) if self.curves(known)]
            instead = f"there are {', '.join(there)}" if there else "it was too short to be measured"
            raise UsageError(f"run {self.number} has nothing called {name!r}; {instead}")
        return curves


def frame(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> Any:
    """A DataFrame, or the rows without pandas. `columns`: those of a frame without rows."""
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows, columns=None if rows else list(columns))


def _took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _when(seconds: float, clock: str) -> str:
    """Date and time; today only the time."""
    moment, now = datetime.fromtimestamp(seconds), datetime.fromtimestamp(time.time())
    day = "" if moment.date() == now.date() else "%d %b " if moment.year == now.year else "%d %b %Y "
    return moment.strftime(day + clock)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 2] + " …"
