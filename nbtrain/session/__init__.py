"""The one place where exchange, strategy, engine and views meet.

core.py          a cell from its text to its end
cell.py          what a cell is
names.py         what it reads; names that do not exist
check.py         the pickle check that is asked for (opening.py: what packs and may not unpack)
run.py           one run: sent, watched
homecoming.py    and brought home, or held for `recover` (report.py: what it says at its end)
compare.py       a cell tried in several ways (trying.py: in one; unkept.py: nothing comes home)
ranks.py         the pool it runs on, from its start to its end (idle.py: GPUs are given back)
background.py    `--background` (reading.py: cells that read what it trains; conflicts.py: or assign it; refusal.py)
audience.py      who is told what happens in a run (controls.py: what they may ask of it)
traffic.py       the notebook's side of the exchange
handles.py       what stayed on the ranks, fetched (kept.py: who in the notebook holds a handle)
relay.py         what ranks write, into the notebook (screen.py: into which cell)
surroundings.py  directory, path and environment of the kernel, for the ranks
patched.py       what cells have set in installed packages
aging.py         what the kernel itself runs in an older version than is on the disk
failure.py       what the ranks raised, as one exception (hints.py: what else is to be said)
memory.py        what is said when memory ran out (instead.py: and what to write in place of the line)
advice.py        what `--strategy auto` takes where a model does not fit under ddp
forked.py        `--start fork`
inkernel.py      `--engine inprocess`
status.py        `%distributed status`
"""

from __future__ import annotations

from nbtrain.session.cell import Cell
from nbtrain.session.session import Session

__all__ = ["Cell", "Session"]
