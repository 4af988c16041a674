"""What the user is told of a run: what it did, what failed and why, what to write instead.

cell_report.py        below a cell that is over: what differs between ranks, what stayed there, what was slow
exception_message.py  what ranks raised, as one exception with the notebook's lines; of a dead rank its signal and line
error_hints.py        a sentence below an error: a name, tensors on several devices, CUDA, a full disk
oom_report.py         memory that ran out; whether a rank that was killed died of it
profile_report.py     `--profile`
stacks.py             `%distributed where`
"""
