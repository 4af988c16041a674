"""Renders a plan as a table, as text and as HTML. Reads `Plan.data()`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import nbtrain.base.humanize as humanize
from nbtrain.base import tables
from nbtrain.base.tables import Row

Data = Mapping[str, Any]

STAR = "★ "
HEAD = ("strategy", "parameters", "gradients", "optimizer", "activations", "buffers", "peak per rank", "sent per step")
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "peak", "sent")
"""fields of an estimate, in the order of the columns"""
WIDE = 60


def blocks(plan: Data) -> Iterator[tables.Block]:
    if rows := [_cells(plan, row) for row in plan["rows"] if not row["available"]]:
        yield _head(plan), rows
    yield "\n".join(_below(plan))


def _head(plan: Data) -> Row:
    return (*HEAD, *(["communication"] if plan["bandwidth"] is not None else []), "fits?")


def _cells(plan: Data, row: Data) -> Row:
    estimate, seconds = row["estimate"], row["seconds"]
    name = (STAR if _is_best(plan, row) else "  ") + _name(row)
    if estimate is None:
        return (name, *[""] * (len(_head(plan)) - 2), row["note"])
    takes = [] if seconds is None else [humanize.time(seconds)]
    return (name, *(humanize.size(estimate[part]) for part in PARTS), *takes, _fits(row))


def _is_best(plan: Data, row: Data) -> bool:
    return bool(row["name"] == plan["recommended"])


def _name(row: Data) -> str:
    """The name column: a row with activation checkpointing stands, indented, below the one without."""
    name: str = row["name"]
    return f"  {name.removeprefix(row['strategy'] + ' ')}" if row["recompute"] else name


def _fits(row: Data) -> str:
    if row["share"] is None:
        return "not known"
    if not row["room"]:
        return "no memory left"
    said = "no" if not row["fits"] else "barely" if row["tight"] else "yes"
    share = row["share"] * 100
    return f"{said}, {math.ceil(share) if share >= 1 else '< 1'} %"


# ---------------------------------------------------------------- below the table


def _below(plan: Data) -> list[str]:
    best = next((row for row in plan["rows"] if _is_best(plan, row)), None)
    lines = [_what(plan), _room(plan)]
    if best is not None:
        lines += [f"{STAR}{plan['why']}", f"  %%distributed {best['line']}"]
    else:
        lines.append(plan["why"])
    lines += _left_out(plan["rows"])
    notes = dict.fromkeys([*plan["notes"], *([] if best is None else _notes(best))])
    return [*lines, *notes]


def _what(plan: Data) -> str:
    made = [
        f"{plan['model'] or 'the model'}: {_count(plan['parameters'])} parameters",
        f"{plan['samples']} samples per rank" if plan["samples"] else "",
        plan["optimizer"] or "no optimizer",
        plan["precision"] if plan["precision"] != "32" else "",
        f"an optimizer step every {plan['accumulate']} batches" if plan["accumulate"] > 1 else "",
    ]
    return " · ".join(filter(None, made))


def _count(number: int) -> str:
    for limit, unit in ((1e9, "billion"), (1e6, "million")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:,}"


def _room(plan: Data) -> str:
    if not plan["rooms"]:
        return "The memory of these devices is not known."
    least = min(plan["rooms"], key=lambda one: (one["bytes"], not one["known"]))
    why = least["why"] if least["bytes"] or not least["known"] else f"no memory left: {least['why']}"
    travels = ""
    if plan["kind"] == "cpu" and not plan["limit"]:
        size = humanize.size(plan["travels"])
        travels = f", less their share of the {size} that they exchange with the notebook"
    return f"{why[0].upper()}{why[1:]}{travels}."


def _left_out(rows: Sequence[Data]) -> Iterable[str]:
    """Strategies that cannot be used here, one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["available"]:
            reasons.setdefault(row["available"], []).append(row["name"])
    return [f"Not available: {', '.join(names)} ({why})" for why, names in reasons.items()]


def _notes(best: Data) -> list[str]:
    return [f"{best['name']}: {note}" for note in (best["estimate"]["notes"] if best["estimate"] is not None else ())]
