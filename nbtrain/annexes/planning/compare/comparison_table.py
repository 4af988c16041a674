"""Renders a comparison as a table and a picture, during and after it. Reads `Comparison.data()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from nbtrain.base import tables
from nbtrain.base.humanize import measured, quantity, size, span
from nbtrain.watch.svg import Axis, Dot, image, scatter

Data = Mapping[str, Any]

WIDTH = 760
STAR = "★"
COMING = ("waiting", "running")
SIZED = ("batch", "model")
"""goals that search for the largest size"""
STATES = {"waiting": "… waiting", "running": "● running", "done": "", "failed": "failed"}


class RowGroup(NamedTuple):
    """The rows of one strategy with several sizes. Where no size is searched, each row is a group."""

    name: str
    rows: tuple[Data, ...]

    @property
    def largest(self) -> Data | None:
        done = [row for row in self.rows if row["state"] == "done"]
        return max(done, key=lambda row: (row["size"] or 0, row["pace"]), default=None)


def shown(comparison: Data) -> dict[str, Any]:
    """The part of `Comparison.data()` that is made for display: title, table (head first), what to type, picture.
    `comparison`: the rest of the data."""
    return {
        "title": _title(comparison),
        "use": use(comparison),
        "table": _sizes(comparison) if comparison["goal"] in SIZED else _speeds(comparison),
        "picture": picture(comparison),
    }


def text(comparison: Data) -> str:
    head, *rows = comparison["table"]
    lines = [comparison["title"], "", tables.text(head, rows)]
    if used := comparison["use"]:
        lines += ["", used]
    return "\n".join(lines)


def html(comparison: Data, saved: bool = True) -> str:
    """`saved`: the output stays in the notebook, so the picture is an image, which untrusted notebooks show too."""
    drawn, (head, *rows) = comparison["picture"], comparison["table"]
    if drawn and saved:
        drawn = image(drawn, "memory and speed")
    return (
        f'{tables.STYLE}<div style="max-width:{WIDTH}px;overflow-x:auto"><p>{escape(comparison["title"])}</p>'
        f"{tables.html(head, rows)}{_use_html(comparison)}{drawn}</div>"
    )


def _use_html(comparison: Data) -> str:
    used, best = escape(comparison["use"]), _best(comparison)
    if best is not None:
        typed = escape(_typed(best))
        used = used.replace(typed, f"<code>{typed}</code>", 1)
    return f"<p>{used}</p>" if used else ""


def _best(comparison: Data) -> Data | None:
    return next((row for row in comparison["rows"] if row["best"]), None)


def use(comparison: Data) -> str:
    """What to type for the best row, or which rows are too close to call; empty until it is over."""
    best = _best(comparison)
    if comparison["goal"] == "growth" or not comparison["over"]:
        return ""
    if close := comparison["close"]:
        return _too_close(comparison, close)
    if best is None:
        return "none of them worked"
    if best["size"] is None or comparison["goal"] not in SIZED:
        return f"use: {_typed(best)}"
    return f"use: {_typed(best)} with {_sized(comparison, best['size'])}"


def _too_close(comparison: Data, close: Sequence[str]) -> str:
    names = list(dict.fromkeys(_name(row) for row in comparison["rows"] if row["name"] in close))
    all_of_them = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    use = "Use any of them" if len(names) > 2 else "Use either"
    if comparison["goal"] in SIZED:
        return f"too close to call: {all_of_them} take the same size. {use}."
    return f"too close to call: {all_of_them}. {use}, or measure longer: --steps {4 * comparison['steps']}"


def _typed(row: Data) -> str:
    return f"%%distributed {row['line']}".rstrip()


def groups(comparison: Data) -> list[RowGroup]:
    """Groups in the order in which they were asked for."""
    by_line: dict[str, list[Data]] = {}
    for row in comparison["rows"]:
        by_line.setdefault(row["line"] if comparison["goal"] in SIZED else str(len(by_line)), []).append(row)
    return [RowGroup(_name(rows[0]), tuple(rows)) for rows in by_line.values()]


def _title(comparison: Data) -> str:
    ways = len(groups(comparison))
    looked = {"batch": "the largest batch of ", "model": f"the largest {comparison['parameter']} of "}
    parts = [f"{looked.get(comparison['goal'], '')}{ways} {'way' if ways == 1 else 'ways'}"]
    waits: list[int] = [len(row["paces"]) for row in comparison["rows"] if row["state"] in COMING]
    rounds = max((len(row["paces"]) for row in comparison["rows"]), default=0)
    times = f"{rounds} × " if rounds > 1 and comparison["over"] else ""
    parts.append(f"{times}{comparison['steps']} {'step' if comparison['steps'] == 1 else 'steps'} of each")
    if (behind := min(waits, default=0)) > 0:
        parts.append(f"round {behind + 1}")
    elif waits:
        parts.append(f"{len(waits)} to come" if len(waits) < len(comparison["rows"]) else "nothing measured yet")
    elif comparison["seconds"]:
        parts.append(f"{comparison['seconds']:.3g} s in all")
    return " · ".join(parts)


def _speeds(comparison: Data) -> list[list[str]]:
    unit = _unit(comparison["rows"])
    several = len({row["ranks"] for row in comparison["rows"] if row["ranks"]}) > 1
    batches = any(row["batch"] for row in comparison["rows"])
    outcomes = [_outcome_of(row) for row in comparison["rows"]]
    columns = [
        ("strategy", [_marked(row["name"], row["best"]) for row in comparison["rows"]]),
        *([("ranks", [str(row["ranks"] or "") for row in comparison["rows"]])] if several else []),
        ("memory per rank", [span(row["memory"]) for row in comparison["rows"]]),
        (unit, [_pace(row, unit) for row in comparison["rows"]]),
        *([("batch", [str(row["batch"] or "") for row in comparison["rows"]])] if batches else []),
        *([("outcome", outcomes)] if any(outcomes) else []),
    ]
    return _transposed(columns)


def _sizes(comparison: Data) -> list[list[str]]:
    found = groups(comparison)
    largest = [group.largest for group in found]
    unit = _unit(comparison["rows"])
    columns = [
        ("strategy", [_marked(one.name, one.largest is not None and one.largest["best"]) for one in found]),
        (f"largest {comparison['parameter'] or 'batch'}", [_largest(comparison, one) for one in found]),
        ("memory per rank", [span(one["memory"]) if one else "" for one in largest]),
        (unit, [_pace(one, unit) if one else "" for one in largest]),
        ("outcome", [_outcome(one) for one in found]),
    ]
    return _transposed(columns)


def _transposed(columns: Sequence[tuple[str, Sequence[str]]]) -> list[list[str]]:
    """The rows of a table, its head first."""
    return [list(row) for row in zip(*([name, *cells] for name, cells in columns), strict=True)]


def _marked(name: str, best: bool) -> str:
    return f"{name} {STAR}" if best else name


def _name(row: Data) -> str:
    """`ddp` for `ddp · batch 64`."""
    whole: str = row["name"]
    name, _, last = whole.rpartition(" · ")
    return name if name and row["size"] is not None and last.split(" ")[-1] == str(row["size"]) else whole


def _sized(comparison: Data, size: Any) -> str:
    """`a batch of 192 per rank`, `depth = 8`"""
    if comparison["goal"] == "model":
        return f"{comparison['parameter']} = {size!r}"
    return f"a batch of {_count(size)} per rank"


def _largest(comparison: Data, group: RowGroup) -> str:
    largest = group.largest
    if largest is None:
        return "" if any(row["state"] in COMING for row in group.rows) else "none"
    return _count(largest["size"]) + (" per rank" if comparison["goal"] == "batch" else "")


def _count(size: Any) -> str:
    """The value of a size parameter need not be a number."""
    return f"{size:,}" if isinstance(size, int) else str(size)


def _outcome(group: RowGroup) -> str:
    """The outcome column: of one row its text; of several `64, 128 · ● 256` or `64 · 128: out of memory`."""
    if len(group.rows) == 1:
        return _outcome_of(group.rows[0])
    rows = sorted(group.rows, key=lambda row: row["size"] or 0)
    failed = [f"{_count(row['size'])}: {_why(row)}" for row in rows if row["state"] == "failed"]
    going = [f"● {_count(row['size'])}" for row in rows if row["state"] == "running"]
    done = ", ".join(_count(row["size"]) for row in rows if row["state"] == "done")
    # of those that failed the smallest: larger ones fail, too
    return " · ".join(filter(None, [done, *failed[:1], *going])) or STATES["waiting"]


def _outcome_of(row: Data) -> str:
    """The outcome of one row. A row that is done may say which size was too large."""
    if row["state"] == "running" and row["why"]:
        return f"● {row['why']}"
    said: dict[str, str] = {"done": row["why"], "failed": _why(row)}
    return said.get(row["state"], STATES[row["state"]])


def _why(row: Data) -> str:
    if not row["no_memory"]:
        return row["why"] or STATES["failed"]
    return row["why"] if "memory" in row["why"] else f"out of memory{': ' if row['why'] else ''}{row['why']}"


def _unit(rows: Sequence[Data]) -> str:
    """`samples/s`, or `steps/s` if no measured row knows its samples."""
    done = [row for row in rows if _is_measured(row)]
    return "steps/s" if done and not any(row["samples_per_second"] for row in done) else "samples/s"


def _is_measured(row: Data) -> bool:
    """Whether its pace is known: it is done, or a round of trials is."""
    return bool(row["state"] == "done" or row["paces"])


def _pace(row: Data, unit: str) -> str:
    if not _is_measured(row) or not row["pace"]:
        return ""
    steps = " steps/s" if unit == "samples/s" and not row["samples_per_second"] else ""
    return f"{measured(row['pace'], row['spread'])}{steps}"


def picture(comparison: Data) -> str:
    """A scatter plot of peak memory and speed; empty while nothing is known."""
    unit = _unit(comparison["rows"])
    if comparison["goal"] == "growth":
        return ""
    sized = comparison["goal"] in SIZED
    dots = []
    for group in groups(comparison):
        for row in sorted(group.rows, key=lambda row: row["size"] or 0):
            pace = row["samples_per_second"] if unit == "samples/s" else row["steps_per_second"]
            if not _is_measured(row) or not row["peak"] or not pace:
                continue
            label = f"{group.name} · {_count(row['size'])}" if sized and row["size"] is not None else group.name
            best = row["best"]
            shown = label if not sized or row is group.largest else ""
            dots.append(
                Dot(row["peak"], pace, _marked(shown, best), best, group.name if sized else "", row["spread"] or 0.0)
            )
    return scatter(dots, Axis("memory per rank, at the most", size), Axis(unit, quantity), _failed(comparison))


def _failed(comparison: Data) -> list[tuple[str, str]]:
    """Groups in which no row worked, and why."""
    found = []
    for group in groups(comparison):
        failed = [row for row in group.rows if row["state"] == "failed"]
        if failed and group.largest is None:
            found.append((group.name, _why(min(failed, key=lambda row: row["size"] or 0))))
    return found
