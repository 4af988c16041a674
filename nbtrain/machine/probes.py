"""What this process may use and what is going on around it: cores, memory, GPUs, the kind of notebook, threads.

Read from the operating system, its cgroups and NVML. Never imports torch and never creates a CUDA
context, so the notebook's kernel may call everything here at any time. Functions take the root of
the file tree they read, so that a container's view can be given to them as files.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path("/")
SELF = Path("/proc/self")
UVM = "/dev/nvidia-uvm"
"""cuInit opens this device and keeps it open; NVML and nvidia-smi do not"""


# ---------------------------------------------------------------- host and cgroup


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Bytes. `limit` is the smaller of what the machine has and what the cgroup allows."""

    host: int
    limit: int
    available: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Bytes of a file system."""

    total: int
    free: int


def cores_allowed(root: Path = ROOT, affinity: int | None = None) -> int:
    """Cores this process may keep busy: its affinity, or its cgroup's quota where that is less. At least 1."""
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = float(affinity)
    for level, version in _levels("cpu", root):
        if version == 2:
            quota, _, period = _text(level / "cpu.max").partition(" ")
        else:
            quota, period = _text(level / "cpu.cfs_quota_us"), _text(level / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            allowed = min(allowed, int(quota) / int(period))
    return max(1, math.ceil(allowed))


GOOGLE = "0x1ae0"
TPUS = {"0x0027", "0x005e", "0x0063", "0x006f", "0x0076"}
"""v2 and v3, v4, v5e, v6e, 7x: as torch_xla 2.9 knows them"""


def tpus(root: Path = ROOT) -> int:
    """Chips that are plugged in here. With PJRT_DEVICE=CPU, XLA's way of trying things out, cores stand for them."""
    if os.environ.get("PJRT_DEVICE") == "CPU":
        return cores_allowed(root)
    found = (root / "sys/bus/pci/devices").glob("*/vendor")
    return sum(_text(one) == GOOGLE and _text(one.with_name("device")) in TPUS for one in found)


def memory(root: Path = ROOT) -> HostMemory:
    """What may be allocated before the out-of-memory killer comes, the cgroup's limits counted at every level."""
    host = {k: int(v.split()[0]) * 1024 for k, _, v in (s.partition(":") for s in _lines(root / "proc/meminfo")) if v}
    if "MemAvailable" in host:
        total, available = host["MemTotal"], host["MemAvailable"]
    else:
        now = psutil.virtual_memory()
        total, available = now.total, now.available
    limit = total
    for level, version in _levels("memory", root):
        most = _text(level / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        # version 1 writes "no limit" as a number larger than any machine
        if not most.isdigit() or int(most) >= total:
            continue
        limit = min(limit, int(most))
        used = _text(level / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        # pages of files that nobody has touched lately are counted as used, yet given back on demand
        name = "inactive_file" if version == 2 else "total_inactive_file"
        cache = next((s.split()[1] for s in _lines(level / "memory.stat") if s.startswith(name + " ")), "0")
        available = min(available, max(0, int(most) - int(used or 0) + int(cache)))
    return HostMemory(host=total, limit=limit, available=available)


def shared_memory(path: Path = Path("/dev/shm")) -> Space | None:
    """Size of the shared-memory file system that DataLoader workers use; None where there is none."""
    try:
        found = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return Space(total=found.f_blocks * found.f_frsize, free=found.f_bavail * found.f_frsize)


def private_memory(pid: int, root: Path = ROOT) -> int | None:
    """Bytes that would come free if the process ended: what it shares with the notebook is not counted.

    About 7 ms per GB on Linux. None: the process is gone, or belongs to somebody else.
    """
    try:
        lines = (root / "proc" / str(pid) / "smaps_rollup").read_text().splitlines()
        return sum(int(s.split()[1]) * 1024 for s in lines if s.startswith("Private_"))
    except (OSError, ValueError):
        pass
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, AttributeError):
        return None


def peak_memory(pid: int, root: Path = ROOT) -> int | None:
    """The most that the process has had at once, with what it shares; None where the system does not say."""
    for line in _lines(root / "proc" / str(pid) / "status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def out_of_memory_kills(root: Path = ROOT) -> int | None:
    """How many processes the system has ended for want of memory since it began."""
    for line in _lines(root / "proc/vmstat"):
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def _levels(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """The directories of this process's cgroup, its own first, then its parents', as (directory, cgroup version)."""
    own: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, described = line.partition(" - ")
        kind, _, options = described.split(" ", 2)
        version, key = (2, "") if kind == "cgroup2" else (1, controller)
        if key not in own or (version == 1 and (kind != "cgroup" or controller not in options.split(","))):
            continue
        top, where = mount.split()[3:5]
        # A container sees its own cgroup as the mount's root, under a path that means nothing inside it.
        inside = own[key] if top == "/" else own[key][len(top) :] if (own[key] + "/").startswith(top + "/") else ""
        base = root / where.lstrip("/")
        level = base / inside.lstrip("/") if ".." not in inside else base
        while True:
            if level.is_dir():
                yield level, version
            if level == base:
                break
            level = level.parent


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


# ---------------------------------------------------------------- GPUs, through NVML


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUser:
    """A process that computes on a card. `memory` None: the driver does not say."""

    pid: int
    memory: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card as the driver counts them (CUDA_VISIBLE_DEVICES plays no part). Memory in bytes."""

    index: int
    uuid: str
    name: str
    total: int = 0
    used: int = 0
    users: tuple[GpuUser, ...] = ()
    """inside a container the driver often hides them; `used` tells then"""


class _Memory1(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Memory2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [
        (name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


_UNKNOWN = 2**64 - 1
_NVML = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"


def gpus(library: str = _NVML) -> tuple[Gpu, ...]:
    """Every card of this machine or container, with who uses it; empty where there is no NVIDIA driver."""
    try:
        with _nvml(library) as nvml:
            count = ctypes.c_uint()
            _check(nvml, nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
            return tuple(_gpu(nvml, index) for index in range(count.value))
    except OSError:
        return ()


def nvml_problem(library: str = _NVML) -> str | None:
    """Why no cards can be read, in the driver's words (a driver updated under a running system, for one)."""
    try:
        with _nvml(library):
            return None
    except OSError as error:
        return str(error)


@contextmanager
def _nvml(library: str) -> Iterator[Any]:
    nvml = ctypes.CDLL(library)
    _check(nvml, nvml.nvmlInit_v2())
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _check(nvml: Any, code: int) -> None:
    if code:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        raise OSError(f"NVML: {(nvml.nvmlErrorString(code) or b'').decode(errors='replace')} (error {code})")


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    _check(nvml, nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)))
    uuid, name = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    _check(nvml, nvml.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(96)))
    _check(nvml, nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(96)))
    # The first version counts what the driver reserves for itself as used: half a gigabyte on an idle card.
    newer = _Memory2(version=ctypes.sizeof(_Memory2) | 2 << 24)
    read: Any = newer
    if not hasattr(nvml, "nvmlDeviceGetMemoryInfo_v2") or nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(newer)):
        read = _Memory1()
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(read))
    return Gpu(
        index=index,
        uuid=uuid.value.decode(),
        name=name.value.decode(errors="replace"),
        total=read.total,
        used=read.used,
        users=_users(nvml, handle),
    )


def _users(nvml: Any, handle: ctypes.c_void_p) -> tuple[GpuUser, ...]:
    for version in ("_v3", "_v2"):
        ask = getattr(nvml, "nvmlDeviceGetComputeRunningProcesses" + version, None)
        if ask is None:
            continue
        room = 64
        for _ in range(4):  # processes may come between the two calls
            count, table = ctypes.c_uint(room), (_Process * room)()
            code = ask(handle, ctypes.byref(count), table)
            if code == 7:  # too small: `count` says how many there are
                room = count.value + 16
                continue
            if code:
                return ()
            return tuple(
                GpuUser(pid=p.pid, memory=None if p.memory == _UNKNOWN else p.memory) for p in table[: count.value]
            )
    return ()


# ---------------------------------------------------------------- the notebook this runs in


def environment(environ: Mapping[str, str] = os.environ, modules: Mapping[str, Any] = sys.modules) -> str:
    """What kind of notebook this is: its limits differ (which buttons work, what may be upgraded)."""
    if "KAGGLE_KERNEL_RUN_TYPE" in environ:  # first: Kaggle's image is built on Colab's
        return "Kaggle"
    if "google.colab" in modules or "COLAB_RELEASE_TAG" in environ:
        return "Colab"
    if "DATABRICKS_RUNTIME_VERSION" in environ:
        return "Databricks"
    if any(name.startswith("SAGEMAKER_") for name in environ):
        return "SageMaker"
    if "JUPYTERHUB_API_URL" in environ:
        return "JupyterHub"
    if ("VSCODE_PID" in environ or "VSCODE_CWD" in environ) and "JPY_SESSION_NAME" not in environ:
        return "VS Code"
    ipython = modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None:
        return "Python"
    return "Jupyter" if hasattr(shell, "kernel") else "IPython"


# ---------------------------------------------------------------- may this process be forked?


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
            f"fork does not copy, so that the ranks would wait for them for ever; {instead} with "
            "`%env OMP_NUM_THREADS=1` above the first `import torch`"
        )
    return None


def _torch_workers(proc: Path) -> str:
    """Native threads that a forked child would wait for: GNU OpenMP's, and torch's own pools; "" if there are none.

    Threads of OpenBLAS, ZeroMQ and LLVM's or Intel's OpenMP are not meant: those libraries start anew
    after a fork. GNU OpenMP's have no name, but they sleep inside libgomp's own code.
    """
    for _ in range(20):
        found = [kind for task in _native_threads(proc) if (kind := _kind(task, _libgomp(proc)))]
        if _BUSY not in found:
            break
        time.sleep(0.005)  # after their work they spin for a moment, and do not show where they are
    return ", ".join(f"{found.count(kind)} {kind}" for kind in dict.fromkeys(found))


_BUSY = "computing"


def _kind(task: Path, libgomp: list[tuple[int, int]]) -> str | None:
    name = _text(task / "comm")
    if name.startswith(("PTThreadPool", "pt_autograd")):
        return "of torch's own pools"
    if not libgomp or name.startswith("ZMQ"):
        return None
    at = _text(task / "syscall").split()
    if not at:  # some sandboxes do not tell; then better no fork than one that hangs
        return "of unknown origin" if task.is_dir() else None
    if at == ["running"]:
        return _BUSY
    return "of OpenMP" if any(low <= int(at[-1], 16) < high for low, high in libgomp) else None


def _libgomp(proc: Path) -> list[tuple[int, int]]:
    """Where the code of GNU OpenMP lies in memory; several packages bring a copy each."""
    found = []
    for line in _lines(proc / "maps"):
        if re.search(r" r-xp .*/libgomp[^/]*\.so", line):
            low, high = line.split()[0].split("-")
            found.append((int(low, 16), int(high, 16)))
    return found


def _native_threads(proc: Path) -> list[Path]:
    python = {str(thread.native_id) for thread in threading.enumerate()} | {str(os.getpid())}
    try:
        return [task for task in (proc / "task").iterdir() if task.name not in python]
    except OSError:
        return []
