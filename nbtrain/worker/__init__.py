"""A rank: one process that runs cells.

rank.py     what a rank does from its first to its last message
process/    its process: how it starts, its environment and process group, its end of the channel, how it is told to end
shell/      the IPython shell that runs the cell, what it writes, and what it says of itself meanwhile
home/       its side of the exchange: parcels opened, what a cell changed on its way home, what differs between ranks
modules/    local modules, loaded again when their file changed; installed packages
"""
