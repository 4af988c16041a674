"""A comparison as people read it: a table and a picture, while it goes on and when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from nbtrain import tables
from nbtrain.planning.scatter import Axis, Dot, image, scatter
from nbtrain.words import quantity, size

if TYPE_CHECKING:
    from nbtrain.planning.compare.comparison import Comparison, MeasuredWay

WIDTH = 760
STAR = "★"
COMING = ("waiting", "running")
SIZED = ("batch", "model")
"""goals for which a size is looked for"""
STATES = {"waiting": "… waiting", "running": "● running", "done": "", "failed": "failed"}


class RowGroup(NamedTuple):
    """The rows of one way, tried with several sizes; without a size each row is one."""

    name: str
    rows: tuple[MeasuredWay, ...]

    @property
    def largest(self) -> MeasuredWay | None:
        done = [row for row in self.rows if row.state == "done"]
        return max(done, key=lambda row: (row.size or 0, row.pace), default=None)


def text(comparison: Comparison) -> str:
    lines = [_title(comparison), "", tables.text(*table(comparison))]
    if used := use(comparison):
        lines += ["", used]
    return "\n".join(lines)


def html(comparison: Comparison, saved: bool = True) -> str:
    """`saved`: this is what stays, also where a notebook is not trusted; else it is replaced soon."""
    drawn = picture(comparison)
    if drawn and saved:
        drawn = image(drawn, "memory and speed")
    return (
        f'{tables.STYLE}<div style="max-width:{WIDTH}px;overflow-x:auto"><p>{escape(_title(comparison))}</p>'
        f"{tables.html(*table(comparison))}{_use_html(comparison)}{drawn}</div>"
    )


def _use_html(comparison: Comparison) -> str:
    used, best = escape(use(comparison)), comparison.best
    if best is not None:
        typed = escape(_typed(best))
        used = used.replace(typed, f"<code>{typed}</code>", 1)
    return f"<p>{used}</p>" if used else ""


def data(comparison: Comparison) -> dict[str, Any]:
    """All of it as plain data: rows as they are, which is best, what to type, and the picture."""
    best = comparison.best
    return {
        "goal": comparison.goal,
        "parameter": comparison.parameter,
        "steps": comparison.steps,
        "seconds": comparison.seconds,
        "title": _title(comparison),
        "rows": [
            {**asdict(row), "memory": list(row.memory), "peak": row.peak, "pace": row.pace, "best": row is best}
            for row in comparison.rows
        ],
        "line": best.line if best is not None else "",
        "use": use(comparison),
        "table": [list(row) for part in [table(comparison)] for row in (part[0], *part[1])],
        "picture": picture(comparison),
    }


def use(comparison: Comparison) -> str:
    """What to type for the best; empty while rows are still to come."""
    best = comparison.best
    if any(row.state in COMING for row in comparison.rows):
        return ""
    if comparison.goal == "growth":
        return ""
    if best is None:
        return "none of them worked"
    if best.size is None or comparison.goal not in SIZED:
        return f"use: {_typed(best)}"
    return f"use: {_typed(best)} with {_sized(comparison, best.size)}"


def _typed(row: MeasuredWay) -> str:
    return f"%%distributed {row.line}".rstrip()


def table(comparison: Comparison) -> tuple[tables.Row, list[tables.Row]]:
    return _sizes(comparison) if comparison.goal in SIZED else _speeds(comparison)


def groups(comparison: Comparison) -> list[RowGroup]:
    """In the order in which they were asked for."""
    found: dict[str, list[MeasuredWay]] = {}
    for row in comparison.rows:
        found.setdefault(row.line if comparison.goal in SIZED else str(len(found)), []).append(row)
    return [RowGroup(_plain(rows[0]), tuple(rows)) for rows in found.values()]


def _title(comparison: Comparison) -> str:
    ways = len(groups(comparison))
    looked = {"batch": "the largest batch of ", "model": f"the largest {comparison.parameter} of "}
    parts = [f"{looked.get(comparison.goal, '')}{ways} {'way' if ways == 1 else 'ways'}"]
    parts.append(f"{comparison.steps} {'step' if comparison.steps == 1 else 'steps'} of each")
    if waits := sum(row.state in COMING for row in comparison.rows):
        parts.append(f"{waits} to come" if waits < len(comparison.rows) else "nothing measured yet")
    elif comparison.seconds:
        parts.append(f"{comparison.seconds:.3g} s in all")
    return " · ".join(parts)


def _speeds(comparison: Comparison) -> tuple[tables.Row, list[tables.Row]]:
    unit = _unit(comparison.rows)
    several = len({row.ranks for row in comparison.rows if row.ranks}) > 1
    batches = any(row.batch for row in comparison.rows)
    told = [_told(row) for row in comparison.rows]
    columns = [
        ("strategy", [_marked(row.name, row is comparison.best) for row in comparison.rows]),
        *([("ranks", [str(row.ranks or "") for row in comparison.rows])] if several else []),
        ("memory per rank", [span(row.memory) for row in comparison.rows]),
        (unit, [_pace(row, unit) for row in comparison.rows]),
        *([("batch", [str(row.batch or "") for row in comparison.rows])] if batches else []),
        *([("outcome", told)] if any(told) else []),
    ]
    return _turned(columns)


def _sizes(comparison: Comparison) -> tuple[tables.Row, list[tables.Row]]:
    found = groups(comparison)
    largest = [group.largest for group in found]
    unit = _unit(comparison.rows)
    columns = [
        ("strategy", [_marked(one.name, one.largest is comparison.best is not None) for one in found]),
        (f"largest {comparison.parameter or 'batch'}", [_largest(comparison, one) for one in found]),
        ("memory per rank", [span(one.memory) if one else "" for one in largest]),
        (unit, [_pace(one, unit) if one else "" for one in largest]),
        ("outcome", [_outcome(one) for one in found]),
    ]
    return _turned(columns)


def _turned(columns: Sequence[tuple[str, Sequence[str]]]) -> tuple[tables.Row, list[tables.Row]]:
    head = tuple(name for name, _ in columns)
    return head, [tuple(row) for row in zip(*(cells for _, cells in columns), strict=True)]


def _marked(name: str, best: bool) -> str:
    return f"{name} {STAR}" if best else name


def _plain(row: MeasuredWay) -> str:
    """`ddp` of `ddp · batch 64`."""
    name, _, last = row.name.rpartition(" · ")
    return name if name and row.size is not None and last.split(" ")[-1] == str(row.size) else row.name


def _sized(comparison: Comparison, size: Any) -> str:
    """`a batch of 192 per rank`, `depth = 8`"""
    return f"{comparison.parameter} = {size!r}" if comparison.goal == "model" else f"a batch of {_count(size)} per rank"


def _largest(comparison: Comparison, group: RowGroup) -> str:
    if group.largest is None:
        return "" if any(row.state in COMING for row in group.rows) else "none"
    return _count(group.largest.size) + (" per rank" if comparison.goal == "batch" else "")


def _count(size: Any) -> str:
    """A parameter of a model need be no number."""
    return f"{size:,}" if isinstance(size, int) else str(size)


def _outcome(group: RowGroup) -> str:
    """Of one row what it says; of several `64, 128 · ● 256` or `64 · 128: out of memory`."""
    if len(group.rows) == 1:
        return _told(group.rows[0])
    rows = sorted(group.rows, key=lambda row: row.size or 0)
    failed = [f"{_count(row.size)}: {_why(row)}" for row in rows if row.state == "failed"][:1]  # larger ones fail, too
    going = [f"● {_count(row.size)}" for row in rows if row.state == "running"]
    done = ", ".join(_count(row.size) for row in rows if row.state == "done")
    return " · ".join(filter(None, [done, *failed, *going])) or STATES["waiting"]


def _told(row: MeasuredWay) -> str:
    """Of one that is done only what it has to say: what would have been too much."""
    if row.state == "running" and row.why:
        return f"● {row.why}"
    said = {"done": row.why, "failed": _why(row)}
    return said.get(row.state, STATES[row.state])


def _why(row: MeasuredWay) -> str:
    if not row.no_memory:
        return row.why or STATES["failed"]
    return row.why if "memory" in row.why else f"out of memory{': ' if row.why else ''}{row.why}"


def _unit(rows: Sequence[MeasuredWay]) -> str:
    """Samples, unless it is known of none that is done how many there were."""
    done = [row for row in rows if row.state == "done"]
    return "steps/s" if done and not any(row.samples_per_second for row in done) else "samples/s"


def _pace(row: MeasuredWay, unit: str) -> str:
    if row.state != "done" or not row.pace:
        return ""
    if unit == "samples/s" and not row.samples_per_second:
        return f"{quantity(row.steps_per_second)} steps/s"
    return quantity(row.samples_per_second if unit == "samples/s" else row.steps_per_second)


def span(memory: Sequence[int]) -> str:
    """What all ranks have, or from the least to the most: `290–310 MB`."""
    if not memory:
        return ""
    low, high = size(min(memory)), size(max(memory))
    if low == high:
        return low
    return f"{low.split()[0] if low.split()[1] == high.split()[1] else low}–{high}"


def picture(comparison: Comparison) -> str:
    """Memory of the rank that has the most, and pace; empty while none is known."""
    unit = _unit(comparison.rows)
    if comparison.goal == "growth":
        return ""
    sized = comparison.goal in SIZED
    dots = []
    for group in groups(comparison):
        for row in sorted(group.rows, key=lambda row: row.size or 0):
            pace = row.samples_per_second if unit == "samples/s" else row.steps_per_second
            if row.state != "done" or not row.peak or not pace:
                continue
            label = f"{group.name} · {_count(row.size)}" if sized and row.size is not None else group.name
            best = row is comparison.best
            shown = label if row is group.largest else ""
            dots.append(Dot(row.peak, pace, _marked(shown, best), best, group.name if sized else ""))
    return scatter(dots, Axis("memory per rank, at the most", size), Axis(unit, quantity), _absent(comparison))


def _absent(comparison: Comparison) -> list[tuple[str, str]]:
    """Ways that failed altogether, and why."""
    found = []
    for group in groups(comparison):
        failed = [row for row in group.rows if row.state == "failed"]
        if failed and group.largest is None:
            found.append((group.name, _why(min(failed, key=lambda row: row.size or 0))))
    return found
