"""`%%distributed --verify` and `%distributed verify [CELL]`: a cell against one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbtrain.annexes.planning.trials import trial_options, verify_cell
from nbtrain.notebook.magics.asked_cell import asked_cell
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState

if TYPE_CHECKING:
    from nbtrain.notebook.cell import Cell


def above_a_cell(state: MagicsState, line: Request, base: Request, cell: Cell) -> None:
    """`%%distributed --verify`"""
    trial_options.begin(state, line, base)
    run(state, line, base, cell)


def run(state: MagicsState, line: Request, base: Request, cell: Cell) -> None:
    request = line.over(base)
    way = trial_options.way(state, str(request.value("strategy")), line, base)
    show = trial_options.LiveOutput(state.shell).show
    verify_cell.verify(state.opened(), way, cell, request.value("steps"), show)


def verify(state: MagicsState, request: Request) -> None:
    """`%distributed verify`: the cell that was run last; `%distributed verify 12`: In[12]."""
    number = request.argument("the number of a cell, as In[12] has it", number=True)
    cell, line, base = asked_cell(state, int(number) if number else None)
    state.opened()  # before the trials' modules import torch, which must not be interrupted
    run(state, Request(given={**line.given, **request.given}, own=line.own), base, cell)
