"""A rank: one process that runs cells.

rank.py     the main loop of a rank, from its first to its last message
process/    its process: start, environment, process group, its end of the channel, interrupts
shell/      the IPython shell that runs the cell, its output, and its meters
home/       its side of the exchange: opens parcels, packs what a cell changed, compares ranks
modules/    reloads local modules whose file changed; watches installed packages
"""
