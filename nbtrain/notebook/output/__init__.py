"""Shows what ranks print and display in the notebook.

rank_output.py     whose output, and lines that differ
screens.py         in which cell it appears
rank_widgets.py    widgets of ranks
blocked_kernel.py  a front end that asks while the kernel is busy
"""
