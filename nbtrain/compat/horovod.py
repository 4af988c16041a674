"""Horovod."""

from __future__ import annotations

START = "horovod.torch.mpi_ops._basics.init"
WAIT = "horovod.torch.mpi_ops.mpi_lib.horovod_torch_wait_and_clear"
