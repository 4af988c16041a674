"""The one place where exchange, strategy, engine and views meet.

session.py    what the magics call: run a cell, start and stop ranks, say how things are
cell.py       what a cell is, once the magic line is taken off
run/          one run of one cell: sent, watched, brought home or held for `recover`
report/       what is said of a run: what it did, what failed and where, what to write instead
output/       what ranks write and show, and into which cell it goes
pool/         the ranks it runs on, from their start to their end; `%distributed status`
sync/         what notebook and ranks hold of each other: objects, handles, environment, modules, packages
background/   `--background`: cells that read or assign what such a run trains
trials/       a cell tried in several ways: compared, verified, `--strategy auto`
"""

from __future__ import annotations

from nbtrain.session.cell import Cell
from nbtrain.session.session import Session

__all__ = ["Cell", "Session"]
