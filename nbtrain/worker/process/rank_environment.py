"""Threads, variables and a device: what makes a process a rank."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress

from nbtrain.compat import python
from nbtrain.specs import RankInfo


def surround(info: RankInfo, backend: str, environ: Mapping[str, str], run_id: str) -> dict[str, str]:
    """The kernel's variables in place of those that this process was born with; returned are those of the rank's own.
    Before torch computes anything: how many threads there are is settled then. `run_id`: one for each pool."""
    import torch

    torch.set_num_threads(info.threads)
    own = {"MPLBACKEND": os.environ["MPLBACKEND"]}
    for name in set(os.environ) - set(environ):
        del os.environ[name]
    os.environ.update(environ)
    own = {
        **own,
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.world_size // info.nodes),
        "GROUP_RANK": str(info.node),
        "GROUP_WORLD_SIZE": str(info.nodes),
        **_as_torchrun(info, run_id),
        "OMP_NUM_THREADS": str(info.threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or _loopback(),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME") or _loopback(),
    }
    if backend == "gloo":
        # torch would keep the stacks, and so the code, of the last 2000 collectives: megabytes that nobody reads.
        own["TORCH_FR_BUFFER_SIZE"] = os.environ.get("TORCH_FR_BUFFER_SIZE") or "0"
    os.environ.update(own)
    return own


def _as_torchrun(info: RankInfo, run_id: str) -> dict[str, str]:
    """What else torchrun sets. The kernel says `MASTER_PORT` before a cell; nobody listens there but the cell's own
    code, which the agent's store is switched off for."""
    return {
        "ROLE_RANK": str(info.rank),
        "ROLE_WORLD_SIZE": str(info.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") or "1",
    }


def settle(info: RankInfo, directory: str) -> None:
    """On its device, and where its temporary files go. `directory`: private to the user."""
    import torch

    # Loader workers' sockets: multiprocessing would leave a directory of its own behind whenever a rank is killed.
    python.put_sockets_into(directory)
    with suppress(FileNotFoundError):
        # Python tries places with a file, once. Torch would be the first to ask, just when a loader's worker has died,
        # and the signal of that death would interrupt it: the file would stay.
        tempfile.gettempdir()
    if info.device.startswith("cuda"):
        torch.cuda.set_device(info.device)
    elif info.device.startswith("xla"):
        from nbtrain.strategies.xla.library import take_place

        take_place(info)


def _loopback() -> str:
    return "lo" if sys.platform == "linux" else "lo0"
