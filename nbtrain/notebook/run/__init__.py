"""One run of one cell: sends it, watches it, brings it home.

cell_run.py       sends the cell, and watches until its ranks have ended; `--hang-after`
run_state.py      what is known of it; run_outcome.py: how each rank has ended
stop_ranks.py     Stop: asks, interrupts, gives up
bring_home.py     its work comes home, or is held for `%distributed recover`
run_error.py      what a run that failed or was stopped raises
observers.py      feed, view, history, `--log-to`
public_record.py  what the server's page sees of it
elastic_run.py    `--nodes MIN:MAX`; elastic_cell.py: what is left of a cell's text
in_kernel.py      `--engine inprocess`
discard_trial.py  a trial, of which nothing comes home
"""
