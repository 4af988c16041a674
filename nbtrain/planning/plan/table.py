"""A plan as a table: for a terminal, and for a notebook's page, with bars of what is needed against the room."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

import nbtrain.words as words
from nbtrain import tables
from nbtrain.tables import Row

if TYPE_CHECKING:
    from nbtrain.planning.plan.plan import Plan, Planned

STAR = "★ "
HEAD = ("strategy", "parameters", "gradients", "optimizer", "activations", "buffers", "peak per rank", "sent per step")
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


def text(plan: Plan) -> str:
    best = plan.recommended
    rows = [_cells(plan, row, _mark(row, best)) for row in plan.rows if not row.available]
    parts = [tables.text(_head(plan), rows, WIDE)] if rows else []
    return "\n".join([*parts, "", *_below(plan)]).strip("\n")


def html(plan: Plan) -> str:
    best = plan.recommended
    top = "".join(f"<th{_number(at)}>{escape(cell)}</th>" for at, cell in enumerate(_head(plan)))
    body = "".join(_tr(plan, row, best) for row in plan.rows if not row.available)
    table = f'<table class="nbt-table nbt-plan"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'
    below = "".join(f'<div class="nbt-plan-words">{_line(line)}</div>' for line in _below(plan))
    return tables.STYLE + STYLE + table + below


def _head(plan: Plan) -> Row:
    return (*HEAD, *(["communication"] if plan.bandwidth is not None else []), "fits its room")


def _cells(plan: Plan, row: Planned, mark: str) -> Row:
    estimate = row.estimate
    if estimate is None:
        return (mark + _name(row), *[""] * (len(_head(plan)) - 2), row.note)
    parts = (
        estimate.parameters,
        estimate.gradients,
        estimate.optimizer,
        estimate.activations,
        estimate.buffers,
        estimate.peak,
        estimate.sent,
    )
    seconds = plan.seconds(row)
    takes = [] if seconds is None else [_seconds(seconds)]
    return (mark + _name(row), *map(words.size, parts), *takes, _fits(row))


def _name(row: Planned) -> str:
    """What computes activations again stands below the same without."""
    return f"  {row.name.removeprefix(row.strategy + ' ')}" if row.recompute else row.name


def _fits(row: Planned) -> str:
    if row.share is None:
        return "not known"
    if not row.room:
        return "no, nothing is left"
    said = "no" if not row.fits else "barely" if row.tight else "yes"
    return f"{said}, {math.ceil(row.share * 100)} %"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _mark(row: Planned, best: Planned | None) -> str:
    return STAR if best is not None and row.name == best.name else "  "


# ---------------------------------------------------------------- what stands below


def _below(plan: Plan) -> list[str]:
    best = plan.recommended
    lines = [_what(plan), _room(plan)]
    if best is not None:
        lines += [f"{STAR}{best.why}", f"  %%distributed {best.line}"]
    else:
        lines.append(plan.why)
    lines += _left_out(plan.rows)
    notes = dict.fromkeys([*plan.profile.notes, *plan.notes, *([] if best is None else _notes(best))])
    return [*lines, *notes]


def _what(plan: Plan) -> str:
    profile = plan.profile
    made = [
        f"{profile.model or 'the model'}: {_count(profile.numel)} parameters",
        f"{profile.samples} samples for each rank" if profile.samples else "",
        profile.optimizer or "no optimizer",
        plan.ground.precision if plan.ground.precision != "32" else "",
        f"an optimizer step every {plan.ground.accumulate} batches" if plan.ground.accumulate > 1 else "",
    ]
    return " · ".join(filter(None, made))


def _count(number: int) -> str:
    for limit, unit in ((1e9, "billion"), (1e6, "million")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:,}"


def _room(plan: Plan) -> str:
    each = plan.ground.each
    if not each:
        return "How much room there is on these devices is not known."
    least = min(each, key=lambda one: (one.bytes, not one.known))
    why = least.why if least.bytes or not least.known else f"no room: {least.why}"
    profile, travels = plan.profile, ""
    if plan.ground.pool.kind == "cpu" and not plan.ground.limit:
        size = profile.parameters + profile.buffers + profile.state
        travels = f", less their share of the {words.size(size)} that travel between them and the notebook"
    return f"{why[0].upper()}{why[1:]}{travels}."


def _left_out(rows: Sequence[Planned]) -> Iterable[str]:
    """One line for each reason."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.available:
            reasons.setdefault(row.available, []).append(row.name)
    return [f"Not here: {', '.join(names)} ({why})" for why, names in reasons.items()]


def _notes(best: Planned) -> list[str]:
    return [f"{best.name}: {note}" for note in (best.estimate.notes if best.estimate is not None else ())]


# ---------------------------------------------------------------- on a page


def _tr(plan: Plan, row: Planned, best: Planned | None) -> str:
    chosen = best is not None and row.name == best.name
    name, *cells = _cells(plan, row, _mark(row, best))
    kind = ' class="nbt-best"' if chosen else "" if row.estimate is not None else ' class="nbt-off"'
    if row.estimate is None:
        return f'<tr{kind}><td><code>{escape(name)}</code></td><td colspan="{len(cells)}">{escape(row.note)}</td></tr>'
    *numbers, fits = cells
    body = "".join(f'<td class="nbt-n">{escape(cell)}</td>' for cell in numbers)
    hint = f' title="{escape(row.note)}"' if row.note else ""
    return f"<tr{kind}{hint}><td><code>{escape(name)}</code></td>{body}<td>{_bar(row)}{escape(fits)}</td></tr>"


def _bar(row: Planned) -> str:
    """Of the room; full and red where that is not enough."""
    share = row.share
    if share is None:
        return ""
    colour = " class=nbt-close" if row.tight else "" if row.fits else " class=nbt-over"
    return f'<span class="nbt-plan-bar"><i{colour} style="width:{min(share, 1.0) * 100:.0f}%"></i></span>'


def _number(at: int) -> str:
    return ' class="nbt-n"' if 0 < at < len(HEAD) else ""


def _line(line: str) -> str:
    """What can be typed is set as code."""
    typed = line.strip()
    if typed.startswith("%%"):
        return f"<code>{escape(typed)}</code>"
    return f"<b>{escape(line)}</b>" if line.startswith(STAR) else escape(line)
