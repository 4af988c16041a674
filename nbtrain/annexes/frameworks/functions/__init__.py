"""Functions that are called in an ordinary cell and run on the ranks: `run`, `predict`, and the launchers of others.

run.py              `nbtrain.run`; run_cell.py: a text as a cell below `%%distributed`; arguments.py: as its line
predict.py          `nbtrain.predict`; prediction_step.py: how a batch is computed
prediction_loop.py  what each rank runs of it, and from which size on predictions go to files
predictions.py      what it returns; predicted_rows.py: rows in the data set's order, `to="pandas"`
launchers.py        other packages' launchers
script_rank.py      in a script the process is a rank; used_objects.py: what a call there trains
"""
