"""Ways of getting ranks. One file an engine; an engine knows nothing of strategies, views or the notebook.

base.py       what a pool is
local.py      processes on this machine
inprocess.py  one rank inside the kernel
elastic.py    processes on machines that have joined by themselves
remote/       how machines join, are talked to and watched; `annexes/machines` starts nodes by ssh, SLURM and Ray
_local/       how local processes are started (warm, spawn, fork), talked to and watched
"""
