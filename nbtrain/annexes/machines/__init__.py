"""Machines that do not join by themselves: ssh, SLURM, Ray and Kubernetes start nodes on them, in the kernel's process.

ssh.py, slurm.py, ray_cluster.py  the engines: each is a door to `engines/remote`; open ssh.py first
start_there.py   what a shell on another machine does, and what its end means
ray_actor.py     has a node in an actor of Ray's; watched_node.py: a node that ends with whoever has started it
queue_files.py   `%distributed join --slurm FILE` and `--kubernetes FILE`
"""
