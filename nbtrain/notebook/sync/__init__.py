"""Keeps the notebook and the ranks alike.

captured_names.py      which names a cell reads; `Out[3]` and names that do not exist are refused
notebook_side.py       what ranks need is sent, what they changed is taken in; names that take long to compare
handles.py             `.pull()`, `.per_rank()`; kept_handles.py: which the notebook still holds
kernel_environment.py  directory, path, variables, settings of libraries
stale_modules.py       modules that are newer on the disk; patched_packages.py: what cells set in packages
waiting_gradients.py   gradients that an earlier cell has left on the ranks
check_report.py        `%distributed check`; unpickle_check.py: what pickles and does not unpickle
"""
