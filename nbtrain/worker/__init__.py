"""A rank: one process that runs cells.

main.py    what a rank does from its first to its last message
link.py    its end of the channel to the notebook
shell.py   the IPython shell that runs the cell
output.py  what it writes, in order
meters.py  what it says of itself while a cell runs
twins.py   its side of the exchange
"""
