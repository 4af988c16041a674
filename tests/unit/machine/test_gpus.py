"""Cards, read from a driver that is compiled for the test."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from nbtrain.machine import gpus
from tests.support.absent import absent

DRIVER = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
static int open_count, cards[2] = {0, 1};
int nvmlInit_v2(void) { open_count++; return FAIL; }
int nvmlShutdown(void) { open_count--; return 0; }
int opened(void) { return open_count; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "other"; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) { *h = &cards[i]; return 0; }
int nvmlDeviceGetUUID(void *h, char *s, unsigned n) { snprintf(s, n, "GPU-%d-uuid", *(int *)h); return 0; }
int nvmlDeviceGetName(void *h, char *s, unsigned n) { snprintf(s, n, "Card %d", *(int *)h); return 0; }
#ifndef OLD
int nvmlDeviceGetMemoryInfo_v2(void *h, Memory2 *m) {
    if (m->version != (sizeof(Memory2) | 2 << 24)) return 25;
    m->total = 1ULL << 37; m->reserved = 500; m->free = 300; m->used = *(int *)h ? 200 : 0; return 0;
}
#endif
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, Process *p) {
    unsigned have = *(int *)h ? 100 : 0, room = *n;
    *n = have;
    if (room < have) return 7;
    for (unsigned i = 0; i < have; i++)
        p[i] = (Process){1000 + i, i == 99 ? ~0ULL : (1ULL << 33) + i, 0xFFFFFFFF, 0xFFFFFFFF};
    return 0;
}
"""
"""A driver library with two cards, in the layout of NVIDIA's header; 100 processes are more than fit at first."""


def driver(where: Path, *flags: str) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        absent("no C compiler", "install gcc: it makes a stand-in for the driver's library")
    library = where / f"libdriver{len(list(where.iterdir()))}.so"
    command = [compiler, "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(library), "-DFAIL=0", *flags]
    subprocess.run(command, input=DRIVER, text=True, check=True)
    return str(library)


def test_cards_are_read_through_the_drivers_library(tmp_path: Path) -> None:
    library = driver(tmp_path)
    idle, busy = gpus.gpus(library)
    assert idle == gpus.Gpu(index=0, uuid="GPU-0-uuid", name="Card 0", total=2**37, used=0)
    assert (busy.uuid, busy.used, len(busy.users)) == ("GPU-1-uuid", 200, 100)
    assert busy.users[1] == gpus.GpuUser(pid=1001, memory=2**33 + 1)
    assert busy.users[99] == gpus.GpuUser(pid=1099, memory=None), "the driver did not say"
    assert gpus.nvml_problem(library) is None
    assert ctypes.CDLL(library).opened() == 0, "what was opened is closed again"


def test_a_driver_older_than_any_that_torch_takes_has_no_cards(tmp_path: Path) -> None:
    assert gpus.gpus(driver(tmp_path, "-DOLD")) == ()


def test_no_cards_and_the_reason_where_the_driver_cannot_be_used(tmp_path: Path) -> None:
    broken = driver(tmp_path, "-UFAIL", "-DFAIL=18")
    assert gpus.gpus(broken) == ()
    assert gpus.nvml_problem(broken) == "NVML: Driver/library version mismatch (error 18)"
    assert gpus.gpus(str(tmp_path / "absent.so")) == ()
    assert "absent.so" in (gpus.nvml_problem(str(tmp_path / "absent.so")) or "")
