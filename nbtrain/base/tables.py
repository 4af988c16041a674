"""Renders tables of short texts, for a terminal, and for a notebook's page with its fonts and colours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from itertools import zip_longest

Row = tuple[str, ...]
Block = str | tuple[Sequence[str], Sequence[Sequence[str]]]
"""a paragraph, or the head and the rows of a table"""

WIDE = 44
"""characters of a cell in a line of text"""
SHORT = 12
"""cells of so few characters are not wrapped on a page"""

STYLE = """<style>
.nbt-table{border-collapse:collapse;font:12px/1.5 var(--jp-ui-font-family,system-ui,sans-serif);margin:0 0 8px}
.nbt-table th,.nbt-table td{text-align:left!important;vertical-align:top;padding:3px 14px 3px 0!important;
 border:0!important;background:none!important;color:inherit}
.nbt-table th{font-weight:500;opacity:.65}
.nbt-table thead tr{border-bottom:1px solid var(--jp-border-color2,rgba(128,128,128,.35))!important}
.nbt-table span{white-space:nowrap}
.nbt-table code{background:none;padding:0;color:inherit}
</style>"""


def text(head: Sequence[str], rows: Sequence[Sequence[str]], wide: int = WIDE) -> str:
    cells = [[textwrap.wrap(cell, wide, break_on_hyphens=False) or [""] for cell in row] for row in (head, *rows)]
    widths = [max(len(line) for row in cells for line in row[column]) for column in range(len(head))]
    lines = []
    for number, row in enumerate(cells):
        for parts in zip_longest(*row, fillvalue=""):
            lines.append("  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip())
        if not number:
            lines.append("  ".join("─" * width for width in widths))
    return "\n".join(lines)


def html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table without STYLE, which is needed once above all tables of an output."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = ""
    for name, *cells in rows:
        body += f"<tr><td><code>{escape(name)}</code></td>" + "".join(f"<td>{_whole(cell)}</td>" for cell in cells)
        body += "</tr>"
    return f'<table class="nbt-table"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def blocks_text(blocks: Iterable[Block], wide: int = WIDE) -> str:
    return "\n\n".join(block if isinstance(block, str) else text(*block, wide) for block in blocks)


def page(blocks: Iterable[Block], more: str = "") -> str:
    """The same as HTML. `more`: what is below."""
    body = ""
    for block in blocks:
        body += f"<p>{'<br>'.join(map(escape, block.splitlines()))}</p>" if isinstance(block, str) else html(*block)
    return f'{STYLE}<div style="max-width:760px;overflow-x:auto">{body}{more}</div>'


def _whole(cell: str) -> str:
    """The cell's HTML: options do not wrap at their hyphens, and short cells not at all."""
    if len(cell) <= SHORT:
        return f"<span>{escape(cell)}</span>"
    parts = (f"<span>{escape(part)}</span>" if part.startswith("-") else escape(part) for part in cell.split(" "))
    return " ".join(parts)
