"""`%distributed strategies`: what each strategy and preset is, if it can be used here, and what a failure costs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from nbtrain import probes, registry
from nbtrain.errors import UsageError
from nbtrain.magics.flags import flags_of
from nbtrain.magics.own import checked, of_notebook
from nbtrain.magics.resolve import missing
from nbtrain.strategies import presets

Row = tuple[str, ...]

STRATEGIES: Row = ("strategy", "shards", "available", "after a failure", "options")
PRESETS: Row = ("preset", "stands for", "available")
OWN: Row = ("of this notebook", "what it says of itself", "available", "options")
WIDE = 44
"""so many characters a cell has in a line of text"""

STYLE = """<style>
.nbt-table{border-collapse:collapse;font:12px/1.5 var(--jp-ui-font-family,system-ui,sans-serif);margin:0 0 8px}
.nbt-table th,.nbt-table td{text-align:left!important;vertical-align:top;padding:3px 14px 3px 0!important;
 border:0!important;background:none!important;color:inherit}
.nbt-table th{font-weight:500;opacity:.65}
.nbt-table thead tr{border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.35))!important}
.nbt-table span{white-space:nowrap}
.nbt-table code{background:none;padding:0;color:inherit}
</style>"""


def strategies() -> list[Row]:
    return [_strategy(entry) for entry in registry.strategies().values()]


def with_presets() -> list[Row]:
    found: list[Row] = []
    for name in presets.names():
        preset = presets.PRESETS[name]
        found.append((name, preset.line, _available(registry.strategy(preset.strategy))))
    return found


def with_own(notebook: Mapping[str, Any]) -> list[Row]:
    found: list[Row] = []
    for name, value in of_notebook(notebook).items():
        cls = value if isinstance(value, type) else type(value)
        says = (vars(cls).get("__doc__") or "").strip().split("\n")[0]
        available, options = _checked(value, name)
        found.append((name, says, available, options))
    return found


def text(notebook: Mapping[str, Any]) -> str:
    return "\n\n".join("\n".join(_text(head, rows)) for head, rows in _tables(notebook))


def html(notebook: Mapping[str, Any]) -> str:
    return STYLE + "".join(_html(head, rows) for head, rows in _tables(notebook))


def _tables(notebook: Mapping[str, Any]) -> list[tuple[Row, list[Row]]]:
    tables = [(STRATEGIES, strategies()), (PRESETS, with_presets()), (OWN, with_own(notebook))]
    return [(head, rows) for head, rows in tables if rows]


def _strategy(entry: registry.Entry) -> Row:
    available = _available(entry)
    held = "held, if all ranks stand at the same step" if entry.in_pieces else "the last step of any rank is held"
    options = ""
    if available == "yes" and not entry.package:
        options = _options(entry.load())
    elif available == "yes":
        try:
            available, options = _checked(entry.load(), entry.where)
        except UsageError as error:
            available = f"no: {error}"
    if entry.unrun:
        available = f"{available}; {entry.unrun}"
    return entry.name, entry.shards, available, held, options


def _checked(found: Any, where: str) -> tuple[str, str]:
    """(available, options) of one that is not nbtrain's."""
    try:
        return "yes", _options(checked(found, where))
    except UsageError as error:
        return f"no: {error}", ""


def _available(entry: registry.Entry) -> str:
    """Or why not, and the command that makes it so."""
    here = {"cpu", *(["cuda"] if probes.gpus() else []), *(["tpu"] if probes.tpus() else [])}
    reason = missing(entry.needs)
    if reason is None and not here.intersection(entry.needs.kinds):
        reason = f"runs on {' and '.join(entry.needs.kinds)}, which this machine has not"
    return f"no: {reason}" if reason else "yes"


def _options(cls: type) -> str:
    return " ".join(flag.flag for typed, flag in flags_of(cls).items() if typed == flag.flag)


def _text(head: Row, rows: Sequence[Row]) -> Iterable[str]:
    cells = [[textwrap.wrap(cell, WIDE, break_on_hyphens=False) or [""] for cell in row] for row in (head, *rows)]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(head))]
    for number, row in enumerate(cells):
        for at in range(max(map(len, row))):
            line = [cell[at] if at < len(cell) else "" for cell in row]
            yield "  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip()
        if not number:
            yield "  ".join("─" * width for width in widths)


def _html(head: Row, rows: Sequence[Row]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = ""
    for name, *cells in rows:
        body += f"<tr><td><code>{escape(name)}</code></td>" + "".join(f"<td>{_whole(cell)}</td>" for cell in cells)
        body += "</tr>"
    return f'<table class="nbt-table"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def _whole(cell: str) -> str:
    """Options are not broken at their hyphens."""
    parts = (f"<span>{escape(part)}</span>" if part.startswith("-") else escape(part) for part in cell.split(" "))
    return " ".join(parts)
