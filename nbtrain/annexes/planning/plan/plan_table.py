"""Renders a plan as a table, as text and as HTML with bars of the memory that is needed. Reads `Plan.data()`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
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

STYLE = """<style>
.nbt-plan td,.nbt-plan th{white-space:nowrap}
.nbt-plan td.nbt-n,.nbt-plan th.nbt-n{text-align:right!important;font-variant-numeric:tabular-nums}
.nbt-plan tr.nbt-best td{background:rgba(66,133,244,.13)!important}
.nbt-plan tr.nbt-off td{opacity:.55}
.nbt-plan td:first-child{padding-left:6px}
.nbt-plan td:first-child code{white-space:pre}
.nbt-plan-bar{display:inline-block;position:relative;width:84px;height:9px;vertical-align:-1px;border-radius:2px;
 background:rgba(128,128,128,.22);overflow:hidden;margin-right:6px}
.nbt-plan-bar i{position:absolute;left:0;top:0;bottom:0;background:#3b7dd8}
.nbt-plan-bar i.nbt-close{background:#d08a1d}
.nbt-plan-bar i.nbt-over{background:#cf4f45}
.nbt-plan-words{font:12px/1.55 var(--jp-ui-font-family,system-ui,sans-serif);margin:0 0 6px;max-width:62em}
.nbt-plan-words code{background:none;padding:0;color:inherit}
</style>"""


def text(plan: Data) -> str:
    rows = [_cells(plan, row) for row in plan["rows"] if not row["available"]]
    parts = [tables.text(_head(plan), rows, WIDE)] if rows else []
    return "\n".join([*parts, "", *_below(plan)]).strip("\n")


def html(plan: Data) -> str:
    top = "".join(f"<th{_number(at)}>{escape(cell)}</th>" for at, cell in enumerate(_head(plan)))
    body = "".join(_tr(plan, row) for row in plan["rows"] if not row["available"])
    table = f'<table class="nbt-table nbt-plan"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    below = "".join(f'<div class="nbt-plan-words">{_line(line)}</div>' for line in _below(plan))
    return tables.STYLE + STYLE + table + below


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


# ---------------------------------------------------------------- HTML


def _tr(plan: Data, row: Data) -> str:
    name, *cells = _cells(plan, row)
    known, note = row["estimate"] is not None, escape(row["note"])
    kind = ' class="nbt-best"' if _is_best(plan, row) else "" if known else ' class="nbt-off"'
    if not known:
        return f'<tr{kind}><td><code>{escape(name)}</code></td><td colspan="{len(cells)}">{note}</td></tr>'
    *numbers, fits = cells
    body = "".join(f'<td class="nbt-n">{escape(cell)}</td>' for cell in numbers)
    hint = f' title="{note}"' if note else ""
    return f"<tr{kind}{hint}><td><code>{escape(name)}</code></td>{body}<td>{_bar(row)}{escape(fits)}</td></tr>"


def _bar(row: Data) -> str:
    """The share of memory as a bar; full and red where it does not fit."""
    share = row["share"]
    if share is None:
        return ""
    colour = " class=nbt-close" if row["tight"] else "" if row["fits"] else " class=nbt-over"
    return f'<span class="nbt-plan-bar"><i{colour} style="width:{min(share, 1.0) * 100:.0f}%"></i></span>'


def _number(at: int) -> str:
    return ' class="nbt-n"' if 0 < at < len(HEAD) else ""


def _line(line: str) -> str:
    """A line below the table as HTML, with what can be typed as code."""
    typed = line.strip()
    if typed.startswith("%%"):
        return f"<code>{escape(typed)}</code>"
    return f"<b>{escape(line)}</b>" if line.startswith(STAR) else escape(line)
