"""What was measured when a training loop ran a few steps under several strategies: the rows, which is the best, and how
that reads as a table and a picture, during and after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nbtrain.annexes.planning.compare.measured_way import MeasuredWay
from nbtrain.base import tables
from nbtrain.base.humanize import measured, quantity, size, span
from nbtrain.watch.svg.base import image
from nbtrain.watch.svg.dots import Axis, Dot
from nbtrain.watch.svg.scatter_plot import scatter

GOALS = ("speed", "batch", "model", "growth")
STAR = "★"
COMING = ("waiting", "running")
SIZED = ("batch", "model")
"""goals that search for the largest size"""
STATES = {"waiting": "… waiting", "running": "● running", "done": "", "failed": "failed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rows, in the order in which they were asked for."""

    rows: tuple[MeasuredWay, ...]
    steps: int
    goal: str = "speed"
    """one of GOALS: the fastest, the largest batch, the largest model; with growth no row is the best"""
    parameter: str = ""
    """the name whose value is changed, where the goal is the largest model"""
    seconds: float = 0.0
    """duration of the whole comparison"""
    over: bool = False

    @property
    def contenders(self) -> tuple[MeasuredWay, ...]:
        """Rows of which any may be the best, once it is over: of the largest size the fastest, and those whose interval
        reaches its. Empty: none worked, or nobody asks for the best."""
        if self.goal == "growth" or not self.over:
            return ()
        done = [row for row in self.rows if row.state == "done"]
        largest = max((row.size or 0 for row in done), default=0)
        largest_rows = [row for row in done if (row.size or 0) == largest]
        first = max(largest_rows, key=lambda row: row.pace, default=None)
        return tuple(row for row in largest_rows if row is first or (first is not None and row.reaches(first)))

    @property
    def best(self) -> MeasuredWay | None:
        """The row that is clearly the best. None: it is too close to call."""
        contenders = self.contenders
        return contenders[0] if len(contenders) == 1 else None

    def with_row(self, at: int, **changes: Any) -> Comparison:
        rows = list(self.rows)
        rows[at] = replace(rows[at], **changes)
        return replace(self, rows=tuple(rows))

    @staticmethod
    def of(names: Iterable[tuple[str, str]], **what: Any) -> Comparison:
        """A comparison of which nothing is measured yet. `names`: name and line of each row."""
        return Comparison(rows=tuple(MeasuredWay(name=name, line=line) for name, line in names), **what)

    def data(self) -> dict[str, Any]:
        """What the picker shows of it."""
        best = self.best
        return {
            "title": title(self),
            "table": table(self),
            "rows": [{"line": row.line, "state": row.state, "best": row is best} for row in self.rows],
            "use": use(self),
            "picture": picture(self),
        }

    def __repr__(self) -> str:
        return tables.blocks_text(_blocks(self))

    def _repr_html_(self) -> str:
        """The picture is an image, which untrusted notebooks show too."""
        drawn = picture(self)
        return tables.page(_blocks(self), image(drawn, "memory and speed") if drawn else "")


def _blocks(comparison: Comparison) -> Iterator[tables.Block]:
    head, *rows = table(comparison)
    yield title(comparison)
    yield head, rows
    if used := use(comparison):
        yield used


def use(comparison: Comparison) -> str:
    """What to type for the best row, or which rows are too close to call; empty until it is over."""
    best, contenders = comparison.best, comparison.contenders
    if comparison.goal == "growth" or not comparison.over:
        return ""
    if not contenders:
        return "none of them worked"
    if best is None:
        return _too_close(comparison, [row.name for row in contenders])
    if best.size is None or comparison.goal not in SIZED:
        return f"use: {_typed(best)}"
    return f"use: {_typed(best)} with {_sized(comparison, best.size)}"


def _too_close(comparison: Comparison, close: Sequence[str]) -> str:
    all_of_them = " and ".join([", ".join(close[:-1]), close[-1]])
    use = "Use any of them" if len(close) > 2 else "Use either"
    if comparison.goal in SIZED:
        return f"too close to call: {all_of_them} take the same size. {use}."
    return f"too close to call: {all_of_them}. {use}, or measure longer: --steps {4 * comparison.steps}"


def _typed(row: MeasuredWay) -> str:
    return f"%%distributed {row.line}".rstrip()


def title(comparison: Comparison) -> str:
    ways = len(comparison.rows)
    looked = {"batch": "the largest batch of ", "model": f"the largest {comparison.parameter} of "}
    parts = [f"{looked.get(comparison.goal, '')}{ways} {'way' if ways == 1 else 'ways'}"]
    waits: list[int] = [len(row.paces) for row in comparison.rows if row.state in COMING]
    rounds = max((len(row.paces) for row in comparison.rows), default=0)
    times = f"{rounds} × " if rounds > 1 and comparison.over else ""
    parts.append(f"{times}{comparison.steps} {'step' if comparison.steps == 1 else 'steps'} of each")
    if (behind := min(waits, default=0)) > 0:
        parts.append(f"round {behind + 1}")
    elif waits:
        parts.append(f"{len(waits)} to come" if len(waits) < len(comparison.rows) else "nothing measured yet")
    elif comparison.seconds:
        parts.append(f"{comparison.seconds:.3g} s in all")
    return " · ".join(parts)


def table(comparison: Comparison) -> list[list[str]]:
    """Its rows, the head first."""
    rows, sized = comparison.rows, comparison.goal in SIZED
    unit = _unit(rows)
    columns = {
        "strategy": [_marked(row.name, row is comparison.best) for row in rows],
        f"largest {comparison.parameter or 'batch'}": [_largest(comparison, row) for row in rows] if sized else [],
        "ranks": [str(row.ranks or "") for row in rows] if len({row.ranks for row in rows if row.ranks}) > 1 else [],
        "memory per rank": ["" if sized and row.state != "done" else span(row.memory) for row in rows],
        unit: [_pace(row, unit) for row in rows],
        "batch": ["" if sized else str(row.batch or "") for row in rows],
        "outcome": [_outcome(row) for row in rows],
    }
    may_be_empty = {"memory per rank", unit}
    shown = {name: cells for name, cells in columns.items() if any(cells) or name in may_be_empty}
    return [list(row) for row in zip(*([name, *cells] for name, cells in shown.items()), strict=True)]


def _marked(name: str, best: bool) -> str:
    return f"{name} {STAR}" if best else name


def _sized(comparison: Comparison, size: Any) -> str:
    """`a batch of 192 per rank`, `depth = 8`"""
    if comparison.goal == "model":
        return f"{comparison.parameter} = {size!r}"
    return f"a batch of {_count(size)} per rank"


def _largest(comparison: Comparison, row: MeasuredWay) -> str:
    if row.state != "done":
        return "" if row.state in COMING else "none"
    return _count(row.size) + (" per rank" if comparison.goal == "batch" else "")


def _count(size: Any) -> str:
    """The value of a size parameter need not be a number."""
    return f"{size:,}" if isinstance(size, int) else str(size)


def _outcome(row: MeasuredWay) -> str:
    """A row that is done may say which size was too large."""
    if row.state == "running" and row.why:
        return f"● {row.why}"
    said: dict[str, str] = {"done": row.why, "failed": _why(row)}
    return said.get(row.state, STATES[row.state])


def _why(row: MeasuredWay) -> str:
    if not row.no_memory:
        return row.why or STATES["failed"]
    return row.why if "memory" in row.why else f"out of memory{': ' if row.why else ''}{row.why}"


def _unit(rows: Sequence[MeasuredWay]) -> str:
    """`samples/s`, or `steps/s` if no measured row knows its samples."""
    done = [row for row in rows if _is_measured(row)]
    return "steps/s" if done and not any(row.samples_per_second for row in done) else "samples/s"


def _is_measured(row: MeasuredWay) -> bool:
    """Whether its pace is known: it is done, or a round of trials is."""
    return bool(row.state == "done" or row.paces)


def _pace(row: MeasuredWay, unit: str) -> str:
    if not _is_measured(row) or not row.pace:
        return ""
    steps = " steps/s" if unit == "samples/s" and not row.samples_per_second else ""
    return f"{measured(row.pace, row.spread)}{steps}"


def picture(comparison: Comparison) -> str:
    """A scatter plot of peak memory and speed; empty while nothing is known."""
    unit = _unit(comparison.rows)
    if comparison.goal == "growth":
        return ""
    dots = []
    for row in comparison.rows:
        pace = row.samples_per_second if unit == "samples/s" else row.steps_per_second
        if not _is_measured(row) or not row.peak or not pace:
            continue
        sized = comparison.goal in SIZED and row.size is not None
        label = f"{row.name} · {_count(row.size)}" if sized else row.name
        dots.append(
            Dot(row.peak, pace, _marked(label, row is comparison.best), row is comparison.best, row.spread or 0.0)
        )
    return scatter(dots, Axis("memory per rank, at the most", size), Axis(unit, quantity))
