"""Which `%%distributed` cell a verb is about: the last one, or one of the notebook's history, with its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtrain.base.errors import UsageError
from nbtrain.notebook.magics import cells
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState

if TYPE_CHECKING:
    from nbtrain.notebook.cell import Cell


def asked_cell(state: MagicsState, number: int | None) -> tuple[Cell, Request, Request]:
    """The distributed cell of this number, or the last one, with its options and the defaults for them."""
    if number is not None:
        line, cell = _numbered(state, number)
        return cell, line, state.defaults
    if state.last_cell is None or state.last_line is None:
        raise UsageError("no %%distributed cell was run yet; write %%distributed above one, or name its number")
    return state.last_cell, *state.last_line


def _numbered(state: MagicsState, number: int) -> tuple[Request, Cell]:
    """A cell of the notebook's history, with the options that stand in it."""
    shell = state.shell
    typed = shell.history_manager.input_hist_raw if shell.history_manager is not None else []
    raw = typed[number] if 0 < number < len(typed) else ""
    head, _, body = raw.lstrip().partition("\n")
    magic, _, options = head.partition(" ")
    if magic not in ("%%distributed", "%%nbtrain"):
        what = f"In[{number}] is no %%distributed cell" if raw else f"there is no In[{number}]"
        raise UsageError(f"{what}; without a number it is the one that was run last")
    name = magic.removeprefix("%%")
    return state.read(options), cells.locate(shell, name, options, body, cells.RawCell(raw, True), number)
