"""The one place where exchange, strategy, engine and views meet.

core.py          a cell from its text to its end
cell.py          what a cell is
names.py         what it reads; names that do not exist
check.py         the pickle check that is asked for (opening.py: what packs and may not unpack)
traffic.py       the notebook's side of the exchange
relay.py         what ranks write, into the notebook
surroundings.py  directory, path and environment of the kernel, for the ranks
failure.py       what the ranks raised, as one exception
inkernel.py      `--engine inprocess`
"""

from __future__ import annotations

from nbtrain.session.cell import Cell
from nbtrain.session.core import Session

__all__ = ["Cell", "Session"]
