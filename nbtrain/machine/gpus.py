"""Finds the GPUs of this machine and who uses them, through NVML, which creates no CUDA context; and its TPUs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtrain.machine.host import ROOT, cores_allowed, read_text


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


class _Memory(ctypes.Structure):
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
_NVML = "libnvidia-ml.so.1"


def gpus(library: str = _NVML) -> tuple[Gpu, ...]:
    """Every card of this machine or container, with who uses it; empty where there is no NVIDIA driver, or one before
    510, under which none of the supported versions of torch has CUDA."""
    try:
        with _nvml(library) as nvml:
            count = ctypes.c_uint()
            _check(nvml, nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)))
            return tuple(_gpu(nvml, index) for index in range(count.value))
    except (OSError, AttributeError):
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
    memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
    nvml.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory))  # zeros where it is the host's
    return Gpu(
        index=index,
        uuid=uuid.value.decode(),
        name=name.value.decode(errors="replace"),
        total=memory.total,
        used=memory.used,
        users=_users(nvml, handle),
    )


def _users(nvml: Any, handle: ctypes.c_void_p) -> tuple[GpuUser, ...]:
    room = 64
    for _ in range(4):  # processes may come between the two calls
        count, table = ctypes.c_uint(room), (_Process * room)()
        code = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), table)
        if not code:
            return tuple(
                GpuUser(pid=p.pid, memory=None if p.memory == _UNKNOWN else p.memory) for p in table[: count.value]
            )
        if code == 7:  # too small: `count` says how many there are
            room = count.value + 16
    return ()


GOOGLE = "0x1ae0"
TPUS = {"0x0027", "0x005e", "0x0063", "0x006f", "0x0076"}
"""v2 and v3, v4, v5e, v6e, 7x: as torch_xla 2.9 knows them"""


def tpus(root: Path = ROOT) -> int:
    """Chips that are plugged in here. With PJRT_DEVICE=CPU, XLA's way of trying things out, cores stand for them."""
    if os.environ.get("PJRT_DEVICE") == "CPU":
        return cores_allowed(root)
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return sum(read_text(vendor) == GOOGLE and read_text(vendor.with_name("device")) in TPUS for vendor in vendors)
