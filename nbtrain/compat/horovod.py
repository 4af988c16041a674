"""Horovod."""

from __future__ import annotations

from nbtrain.compat.internals import Internals

its = Internals("horovod")
check = its.check

START = "horovod.torch.mpi_ops._basics.init"
WAIT = "horovod.torch.mpi_ops.mpi_lib.horovod_torch_wait_and_clear"
