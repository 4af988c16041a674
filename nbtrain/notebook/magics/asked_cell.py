"""`%%distributed --verify` and `%distributed verify [CELL]`: a cell against one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtrain.errors import UsageError
from nbtrain.magics import cells, trial_options
from nbtrain.magics.line.parse import Request
from nbtrain.magics.state import MagicsState

if TYPE_CHECKING:
    from nbtrain.session import Cell


def run(state: MagicsState, line: Request, base: Request, cell: Cell) -> None:
    """`%%distributed --verify` above a cell."""
    request = line.over(base)
    way = trial_options.way(state, str(request.value("strategy")), line, base)
    state.opened().verify(way, cell, request.value("steps"), trial_options.LiveOutput(state.shell).show)


def verify(state: MagicsState, request: Request) -> None:
    """`%distributed verify`: the cell that was run last; `%distributed verify 12`: In[12]."""
    words = [word.plain for word in request.words[1:]]
    if len(words) > 1 or (words and not words[0].isdecimal()):
        raise UsageError(f"verify takes the number of a cell, as In[12] has it, not {' '.join(words)!r}")
    cell, line, base = asked_cell(state, int(words[0]) if words else None)
    state.opened()  # before the trials' modules import torch, which must not be interrupted
    run(state, Request(given={**line.given, **request.given}, own=line.own), base, cell)


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
