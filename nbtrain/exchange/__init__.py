"""Notebook objects ⇄ parcels: what a cell needs goes to the ranks, what it changed comes home.

    names.py         which names a cell reads (places.py: in which order they stand)
    residence.py     who holds what: the table of twins, the walk that finds what changed, the putting in place
    kinds/           how each kind of object is looked at, made and edited in place
    baseline.py      what files of local modules made, and what became of it (meet.py: both sides' own of it)
    fingerprint.py   numbers that tell whether content changed
    parcel.py        bytes: one pickle and shared memory beside it
    pickle_check.py  what cannot travel, named: its path (reach.py), its line (origin.py), the remedy (remedies.py)

Nothing here imports IPython: a namespace is handed in. Importing these modules imports neither torch nor NumPy:
functions that handle their objects do, when the notebook has them.
"""
