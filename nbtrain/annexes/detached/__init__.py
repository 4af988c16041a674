"""Runs that outlive their notebook: `%%distributed --detach`, `%distributed runs` and `attach`.

A detached run belongs to a *keeper* (`keeper.py`): a process with a session of its own that has what the cell needs,
runs it on ranks of its own as a notebook would, and keeps what it did in the run's folder (`run_folders.py`). Any
notebook shows it meanwhile (`shown_run.py`), takes its weights so far (`weights_so_far.py`) and its work home
(`take_home.py`), and goes on from where it ended (`resume_verb.py`, `plain_loops.py`). The kernel that starts it
(`start.py`) may end as soon as the keeper has it.
"""
