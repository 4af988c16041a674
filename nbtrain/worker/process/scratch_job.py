"""What a scratch process does: one job of the kernel's, in the kernel's path and environment."""

from __future__ import annotations

import io
import os
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Any

from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.exchange.graph.open_parcel import OpenedParcel, Unmakeable
from nbtrain.exchange.kinds.base import learn_atoms
from nbtrain.exchange.kinds.remedies import GENERAL
from nbtrain.exchange.parcel import Opener, Parcel
from nbtrain.worker.process.rank_environment import NotebookEnvironment


def serve(end: int, shell: Any) -> None:
    """`end`: of a pipe to the kernel; `shell`: a rank's, whose namespace is `__main__`."""
    import torch

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


def open_parcel(parcel: Parcel) -> tuple[int | None, str, str] | None:
    """Open what ranks would be sent. Returns what cannot be made, by its key if it is known, why, and what to do
    instead; None: all of it can."""
    learn_atoms()
    try:
        content, buffer = Opener().open(parcel)
        names = vars(sys.modules["__main__"])
        OpenedParcel(ObjectTable(-1, -1), names, content, buffer, lambda kind: "cpu", lenient=True).commit()
    except Unmakeable as error:
        return error.key, error.why, error.instead
    except Exception as error:  # a class may raise anything
        return None, str(error), GENERAL
    return None
