"""Ways of getting ranks. One file an engine; an engine knows nothing of strategies, views or the notebook.

base.py       what a pool is
local.py      processes on this machine
inprocess.py  one rank inside the kernel
elastic.py    processes on machines that have joined by themselves
ssh.py        on machines that ssh leads to
slurm.py      on nodes that SLURM gives
ray_cluster.py  on machines of a Ray cluster
remote/       what these four have in common: how machines join, are talked to and watched
_local/       how local processes are started (warm, spawn, fork), talked to and watched
"""
