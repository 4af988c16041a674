"""Ways of getting ranks. One file an engine; an engine knows nothing of strategies, views or the notebook.

base.py       what a pool is
local.py      processes on this machine
inprocess.py  one rank inside the kernel
ray_cluster.py  machines of a Ray cluster
_local/       how local processes are started (warm, spawn, fork), talked to and watched
"""
