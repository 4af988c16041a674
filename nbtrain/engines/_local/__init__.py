"""Local processes: how they are started, talked to and watched.

blackbox.py        what can be read of a dead rank
directory.py       the private directory of a pool
kernel_channel.py  the kernel's end of the sockets
processes.py       what the ways to start ranks have in common
nursery.py         the process that ranks are forked from, and its protocol
warm.py            ranks forked from the nursery
scratch.py         one job in a process of its own, forked from the nursery
outliving.py       a process that outlives the kernel, with a nursery of its own
spawn.py           a fresh interpreter for each rank
fork.py            ranks forked from the kernel itself
"""
