"""Horovod. Nothing here imports it before it is used.

Horovod's last release, 0.28.1 of 2023, runs with a new torch: nbtrain gives it flat tensors to add up, and does not use
its DistributedOptimizer, so it takes the tensors' memory, by a C++ extension, and a few names that are still there. The
extension is compiled once for a torch and a Python; for another torch it does not load, or warns. torch's headers want
C++20 (2.13; C++17 since 2.1) and Horovod's CMake asks for C++14; a torch built for CUDA makes it ask for CUDA's
toolkit; its setup wants the setuptools and torch that are there. `.ci/horovod` compiles it with all of this put right.
"""

from __future__ import annotations

from contextlib import suppress

from nbtrain.compat.internals import Internals

its = Internals("horovod")

# --- what is replaced (nbtrain/compat/replaced_functions.py) --------------------------------------------

START = "horovod.torch.mpi_ops._basics.init"
"""Called by `hvd.init()`: the ranks connect."""
WAIT = "horovod.torch.mpi_ops.mpi_lib.horovod_torch_wait_and_clear"
"""Called by `hvd.synchronize(handle)`: it waits in C without sleeping, where nothing can interrupt it."""

its.members("horovod.torch.mpi_ops", "_basics", "_handle_map", "poll", "synchronize")
its.members("horovod.common.basics.HorovodBasics", "init")
its.members("horovod.torch.mpi_ops.mpi_lib", "horovod_torch_wait_and_clear")
its.members("horovod.runner.http.http_server", "RendezvousHTTPServer", "RendezvousHandler")


def forget_sent() -> None:
    """Release what nobody has waited for, once Horovod is down. It keeps such tensors, and its next start only lays
    their table aside."""
    import horovod.torch as hvd

    sent = hvd.mpi_ops._handle_map
    for handle in list(sent):
        with suppress(Exception):  # that it was shut down
            hvd.synchronize(handle)
    sent.clear()
