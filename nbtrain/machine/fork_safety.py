"""Finds whether a fork of this process could compute: CUDA, a process group and torch's threads do not survive one.

Read from the operating system, without importing torch, so the kernel may ask at any time.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbtrain.machine.host import read_lines, read_text

SELF = Path("/proc/self")
UVM = "/dev/nvidia-uvm"
"""cuInit opens this device and keeps it open; NVML and nvidia-smi do not"""


def cuda_initialised(
    proc: Path = SELF, modules: Mapping[str, Any] = sys.modules, device: str | Path = UVM
) -> str | None:
    """Who initialised CUDA in this process: "torch", "the CUDA driver" (some other code), or None: nobody."""
    torch = modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return "torch"
    return "the CUDA driver" if os.path.lexists(device) and _open(proc, str(device)) else None


def _open(proc: Path, path: str) -> bool:
    """Whether the process has this file open. Asked twice for each cell of a notebook, hence no Path for each file."""
    folder = os.path.join(proc, "fd")
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        try:
            if os.readlink(f"{folder}/{name}") == path:
                return True
        except OSError:  # closed since
            continue
    return False


def why_not_fork(proc: Path = SELF, modules: Mapping[str, Any] = sys.modules, device: str | Path = UVM) -> str | None:
    """Why a fork of this process could not compute, and what to write instead; None where it could."""
    if sys.platform != "linux":
        return f"`--start fork` works on Linux only (this is {sys.platform}); write `--start spawn`"
    instead = "write `--start warm` (the default), or restart the kernel"
    if who := cuda_initialised(proc, modules, device):
        return (
            f"`--start fork` is not possible: CUDA is initialised in this kernel (by {who}) and does not survive a "
            f"fork; {instead} and leave the GPU alone before this cell"
        )
    torch = modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return (
            "`--start fork` is not possible: this kernel is itself a member of a process group; write "
            "`torch.distributed.destroy_process_group()`, or `--start warm` (the default)"
        )
    if workers := _torch_workers(proc):
        return (
            f"`--start fork` is not possible: torch has started worker threads in this kernel ({workers}), which a "
            f"fork does not copy, so that the ranks would wait for them forever; {instead} with "
            "`%env OMP_NUM_THREADS=1` above the first `import torch`"
        )
    return None


def _torch_workers(proc: Path) -> str:
    """Native threads that a forked child would wait for: GNU OpenMP's, and torch's own pools; "" if there are none.

    Threads of OpenBLAS, ZeroMQ and LLVM's or Intel's OpenMP are not meant: those libraries start anew
    after a fork. GNU OpenMP's have no name, but they sleep inside libgomp's own code.
    """
    for _ in range(20):
        kinds = [kind for task in _native_threads(proc) if (kind := _kind(task, _libgomp(proc)))]
        if _BUSY not in kinds:
            break
        time.sleep(0.005)  # after their work they spin for a moment, and do not show where they are
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))


_BUSY = "computing"


def _kind(task: Path, libgomp: list[tuple[int, int]]) -> str | None:
    name = read_text(task / "comm")
    if name.startswith(("PTThreadPool", "pt_autograd")):
        return "of torch's own pools"
    if not libgomp or name.startswith("ZMQ"):
        return None
    at = read_text(task / "syscall").split()
    if not at:  # some sandboxes do not tell; then better no fork than one that hangs
        return "of unknown origin" if task.is_dir() else None
    if at == ["running"]:
        return _BUSY
    return "of OpenMP" if any(low <= int(at[-1], 16) < high for low, high in libgomp) else None


def _libgomp(proc: Path) -> list[tuple[int, int]]:
    """Where the code of GNU OpenMP lies in memory; several packages bring a copy each."""
    ranges = []
    for line in read_lines(proc / "maps"):
        if re.search(r" r-xp .*/libgomp[^/]*\.so", line):
            low, high = line.split()[0].split("-")
            ranges.append((int(low, 16), int(high, 16)))
    return ranges


def _native_threads(proc: Path) -> list[Path]:
    python = {str(thread.native_id) for thread in threading.enumerate()} | {str(os.getpid())}
    try:
        return [task for task in (proc / "task").iterdir() if task.name not in python]
    except OSError:
        return []
