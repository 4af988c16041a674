"""`%distributed export train.py`: a cell, and what it needs of the notebook, as a script for torchrun."""
