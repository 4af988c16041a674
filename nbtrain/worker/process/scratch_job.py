"""What a scratch process does: one job of the kernel's, in the kernel's path and environment."""

from __future__ import annotations

import io
import os
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch

from nbtrain.worker.process.rank_environment import NotebookEnvironment


def serve(end: int, shell: Any) -> None:
    """`end`: of a pipe to the kernel; `shell`: a rank's, whose namespace is `__main__`."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    sys.stdout = sys.stderr = io.StringIO()
    kernel = Connection(end)
    kernel.send(os.getpid())
    job, environment, payload = kernel.recv()
    torch.set_num_threads(1)
    NotebookEnvironment(shell, {"MPLBACKEND": os.environ["MPLBACKEND"]}).take(environment)
    warnings.simplefilter("ignore")
    kernel.send(job(payload))
