"""Reads which cores and memory this process may use, and in which kind of notebook it runs.

Read from the operating system and its cgroups, so the kernel may call everything here at any time. Functions take the
root of the file tree they read: a test gives them a container's view as files.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

ROOT = Path("/")
_NO_PROCESS = re.compile(r"can't start new thread|pthread_create failed|Thread creation failed")
"""what Python, OpenBLAS and OpenMP say where there can be no more"""
_PERHAPS = re.compile(r"Resource temporarily unavailable|terminate called without an active exception")
"""what the system says of that, and of a locked file or a busy socket too; gloo, of that and of other errors"""
NEAR = 64
"""processes and threads below a limit, which a rank may have had before it ended"""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """Memory of the host in bytes. `limit`: the smaller of what the machine has and what the cgroup allows."""

    host: int
    limit: int
    available: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Size of a file system in bytes."""

    total: int
    free: int


def cores_allowed(root: Path = ROOT, affinity: int | None = None) -> int:
    """Cores this process may keep busy: its affinity, or its cgroup's quota where that is less. At least 1."""
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allowed = float(affinity)
    for level, version in _levels("cpu", root):
        if version == 2:
            quota, _, period = read_text(level / "cpu.max").partition(" ")
        else:
            quota, period = read_text(level / "cpu.cfs_quota_us"), read_text(level / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            allowed = min(allowed, int(quota) / int(period))
    return max(1, math.ceil(allowed))


def memory(root: Path = ROOT) -> HostMemory:
    """What may be allocated before the out-of-memory killer comes, the cgroup's limits counted at every level."""
    rows = (line.partition(":") for line in read_lines(root / "proc/meminfo"))
    host = {name: int(size.split()[0]) * 1024 for name, _, size in rows if size}
    if "MemAvailable" in host:
        total, available = host["MemTotal"], host["MemAvailable"]
    else:
        now = psutil.virtual_memory()
        total, available = now.total, now.available
    limit = total
    for level, version in _levels("memory", root):
        most = read_text(level / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        # version 1 writes "no limit" as a number larger than any machine
        if not most.isdigit() or int(most) >= total:
            continue
        limit = min(limit, int(most))
        used = read_text(level / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        # pages of files that nobody has touched lately are counted as used, yet given back on demand
        name = "inactive_file" if version == 2 else "total_inactive_file"
        cache = next((s.split()[1] for s in read_lines(level / "memory.stat") if s.startswith(name + " ")), "0")
        available = min(available, max(0, int(most) - int(used or 0) + int(cache)))
    return HostMemory(host=total, limit=limit, available=available)


def shared_memory(path: Path = Path("/dev/shm")) -> Space | None:
    """Size of the shared-memory file system that DataLoader workers use; None where there is none."""
    try:
        stats = os.statvfs(path)
    except (OSError, AttributeError):
        return None
    return Space(total=stats.f_blocks * stats.f_frsize, free=stats.f_bavail * stats.f_frsize)


def private_memory(pid: int) -> int | None:
    """Bytes that would come free if the process ended: what it shares with the notebook is not counted.

    About 7 ms per GB on Linux. None: the process is gone, or belongs to somebody else.
    """
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, AttributeError):
        return None


def peak_memory(pid: int, root: Path = ROOT) -> int | None:
    """The most memory that the process has had, shared pages included; None where the system does not say."""
    for line in read_lines(root / "proc" / str(pid) / "status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def out_of_memory_kills(root: Path = ROOT, anywhere: bool = False) -> int | None:
    """How many processes have been killed for lack of memory: of this container, or, if its cgroup does not count them
    or `anywhere`, of the whole machine. None: nobody counts them."""
    counts = {1: "memory.oom_control", 2: "memory.events"}
    levels = [] if anywhere else [level / counts[version] for level, version in _levels("memory", root)]
    for path in (*levels, root / "proc/vmstat"):
        for line in read_lines(path):
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def allow_descriptors(count: int) -> None:
    """Raise this process's own limit of open files to so many, or to what it may have."""
    if hasattr(psutil, "RLIMIT_NOFILE"):  # Linux
        process = psutil.Process()
        soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
        wanted = count if hard == psutil.RLIM_INFINITY else min(count, hard)
        if soft != psutil.RLIM_INFINITY and soft < wanted:
            with suppress(psutil.Error, OSError, ValueError):
                process.rlimit(psutil.RLIMIT_NOFILE, (wanted, hard))


def progress(pid: int, root: Path = ROOT) -> tuple[bool, Any]:
    """Whether the process is stopped (SIGSTOP, a debugger), and what grows while it runs; None if the system does not
    say it."""
    _, _, words = read_text(root / "proc" / str(pid) / "stat").rpartition(") ")
    if not words:
        return False, None
    state, *numbers = words.split()
    lines = read_lines(root / "proc" / str(pid) / "status")
    return state in "Tt", (numbers[10:12], [line for line in lines if "ctxt_switches" in line])


def of_processes(text: str, root: Path = ROOT, starting: bool = False) -> str:
    """What is to be said where this error means that there can be no more processes or threads; empty where it does
    not. `starting`: a process was to be started."""
    perhaps = _PERHAPS.search(text) is not None
    sure = _NO_PROCESS.search(text) is not None or (starting and perhaps)
    if not sure and not perhaps:
        return ""
    limits_near = []
    for level, _ in _levels("pids", root):
        limit, now = read_text(level / "pids.max"), read_text(level / "pids.current")
        if limit.isdigit() and now.isdigit():
            limits_near.append((int(limit) - int(now), f"this container may have {limit} (pids.max) and has {now}"))
    most = psutil.Process().rlimit(psutil.RLIMIT_NPROC)[0] if hasattr(psutil, "RLIMIT_NPROC") else -1
    if most > 0:
        users = sum(1 for process in psutil.process_iter() if _uid(process) == os.geteuid())
        limits_near.append((most - users, f"your user may have {most} (ulimit -u) and has {users} processes"))
    if not sure and (not limits_near or min(limits_near)[0] > NEAR):
        return ""
    limits = min(limits_near)[1] if limits_near else "see ulimit -u, and the container's limit of pids"
    return (
        f"there can be no more processes and threads: {limits}. Take fewer ranks (--devices) or workers (num_workers), "
        "or allow more: ulimit -u 4096 before Jupyter starts, docker run --pids-limit"
    )


def _uid(process: psutil.Process) -> int:
    try:
        return int(process.uids().effective)
    except psutil.Error:
        return -1


@cache
def environment() -> str:
    """What kind of notebook this is: its limits differ (which buttons work, what may be upgraded). It does not change
    while the process lives, and every cell asks."""
    return environment_of(os.environ, sys.modules)


def environment_of(environ: Mapping[str, str], modules: Mapping[str, Any]) -> str:
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


def _levels(controller: str, root: Path) -> Iterator[tuple[Path, int]]:
    """The directories of this process's cgroup, its own first, then its parents', as (directory, cgroup version)."""
    own: dict[str, str] = {}
    for line in read_lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    for line in read_lines(root / "proc/self/mountinfo"):
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


def read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def read_lines(path: Path) -> list[str]:
    return read_text(path).splitlines()
