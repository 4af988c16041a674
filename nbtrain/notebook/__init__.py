"""The kernel's side: reads the line, sends the cell, brings it home, tells the user. Open session.py first.

magics/       what may be typed: the line, the verbs
session.py    what the magics call: run a cell, start and stop ranks, say how things are
cell.py       a cell without its magic line; verb.py: what a verb is
run/          one run of one cell: sent, watched, brought home or held for `recover`
report/       what the user is told of a run: what it did, what failed and where, what to write instead
output/       shows what ranks print and display, in the cell that it belongs to
pool/         the ranks it runs on, from their start to their end; `%distributed status`
sync/         keeps notebook and ranks alike: objects, handles, environment, modules, packages
background/   `--background`: cells that read or assign what such a run trains
debugging/    breakpoints of ranks: whose turn it is, and what the user types
annexes.py    what is loaded when it is asked for: compare, verify, plan, export, several machines
doctor.py     `%distributed doctor`: what this machine and its installation can do
"""
