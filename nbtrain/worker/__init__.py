"""A rank: one process that runs cells. Open rank.py first.

rank.py     the main loop of a rank, from its first to its last message, and which of them does what
process/    its process: start, environment, process group, its end of the channel, interrupts; the run of a cell
shell/      the IPython shell that runs the cell, its output, and its meters
home/       its side of the exchange: opens parcels, packs what a cell changed, compares ranks
modules/    reloads local modules whose file changed; watches installed packages
debugging/  breakpoints, and where ranks stand

What goes on around a cell's loop, while it runs, is made of parts (parts.py). runtime.py has their order;
backward_and_step.py is what runs around a backward and a step, batches.py what a batch is made of:

setup/      the models, optimizers and loaders of the cell are found and given to the strategy; `with whole(...)`
loop/       forward, backward and step as the loop reaches them; `--accumulate`; the board; Stop
data/       which rank gets which batch; how long a loader is
precision/  `--precision`, `--checkpoint-activations`
gradients/  whether ranks average what one process would sum
ranks/      what ranks do together, and whether they are alike
checkpoints/ save, load, resume
measure/    memory and time
random_states/ the random numbers of one process, on each rank
"""
