"""A rank: one process that runs cells.

main.py          what a rank does from its first to its last message
link.py          its end of the channel to the notebook
shell.py         the IPython shell that runs the cell
output.py        what it writes, in order
meters.py        what it says of itself while a cell runs
interrupts.py    being told to end
twins.py         its side of the exchange
homeward.py      what a cell changed, on its way home (sameness.py: what differs between ranks)
streams.py       random states on their way
surroundings.py  the kernel's directory, path, environment and settings of torch
local_files.py   whose files are somebody's work in progress, and when they are executed
settings.py      those of Python and of libraries: warnings, logging, printing
modules.py       local modules, loaded again (renewal.py: who holds the old text; packages.py: installed ones)
"""
