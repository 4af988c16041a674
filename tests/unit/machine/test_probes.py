"""What this process may use: read from trees of files as containers show them, from real processes, from a driver."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nbtrain.machine import probes
from tests.support.absent import absent

GIB = 2**30
V1_UNLIMITED = "9223372036854771712"


def tree(root: Path, files: Mapping[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB"


def v2(root: Path, files: Mapping[str, object], own: str = "/") -> Path:
    """A container under cgroup version 2."""
    mount = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw"
    base = {
        "proc/self/cgroup": f"0::{own}",
        "proc/self/mountinfo": f"22 1 8:1 / / rw - ext4 /dev/sda rw\n{mount}",
        "proc/meminfo": meminfo(64 * GIB, 60 * GIB),
    }
    return tree(root, {**base, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})


def v1(root: Path, files: Mapping[str, object], own: str, top: str) -> Path:
    """A container under cgroup version 1."""
    point = "/sys/fs/cgroup"
    base = {
        "proc/self/cgroup": f"4:memory:{own}\n1:cpu,cpuacct:{own}\n0::/",
        "proc/self/mountinfo": f"32 31 0:29 {top} {point}/cpu,cpuacct ro master:9 - cgroup cgroup rw,cpu,cpuacct\n"
        f"35 31 0:32 {top} {point}/memory ro master:10 - cgroup cgroup rw,memory",
        "proc/meminfo": meminfo(64 * GIB, 60 * GIB),
    }
    return tree(root, {**base, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}})


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("5000 100000", 1), ("1600000 100000", 8), ("", 8)],
)
def test_cores_are_those_the_quota_allows_rounded_up(tmp_path: Path, quota: str, cores: int) -> None:
    assert probes.cores_allowed(v2(tmp_path, {"cpu.max": quota}), affinity=8) == cores


def test_a_parents_limit_counts_too(tmp_path: Path) -> None:
    files = {
        "user.slice/cpu.max": "300000 100000",
        "user.slice/kernel/cpu.max": "max 100000",
        "user.slice/memory.max": 8 * GIB,
        "user.slice/memory.current": 5 * GIB,
        "user.slice/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}",
        "user.slice/kernel/memory.max": 16 * GIB,
        "user.slice/kernel/memory.current": GIB,
    }
    root = v2(tmp_path, files, own="/user.slice/kernel")
    assert probes.cores_allowed(root, affinity=64) == 3
    assert probes.memory(root) == probes.HostMemory(host=64 * GIB, limit=8 * GIB, available=4 * GIB)


@pytest.mark.parametrize(
    ("own", "top", "inside"),
    [
        ("/docker/ab12", "/docker/ab12", ""),  # Docker
        ("/", "/", ""),  # a cgroup namespace
        ("/jobs/7", "/", "jobs/7/"),  # SLURM
        ("/docker/ab12/sub", "/docker/ab12", "sub/"),
        ("/docker/ab123", "/docker/ab12", ""),  # a path that only looks alike
        ("/../../other", "/", ""),
    ],
)
def test_version_one_wherever_the_cgroup_is_mounted(tmp_path: Path, own: str, top: str, inside: str) -> None:
    files = {
        f"cpu,cpuacct/{inside}cpu.cfs_quota_us": 250000,
        f"cpu,cpuacct/{inside}cpu.cfs_period_us": 100000,
        f"memory/{inside}memory.limit_in_bytes": 4 * GIB,
        f"memory/{inside}memory.usage_in_bytes": 3 * GIB,
        f"memory/{inside}memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
    }
    root = v1(tmp_path, files, own, top)
    assert probes.cores_allowed(root, affinity=16) == 3
    assert probes.memory(root) == probes.HostMemory(host=64 * GIB, limit=4 * GIB, available=2 * GIB)


def test_no_limit_is_the_machine(tmp_path: Path) -> None:
    unlimited = {
        "cpu,cpuacct/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/cpu.cfs_period_us": 100000,
        "memory/memory.limit_in_bytes": V1_UNLIMITED,
        "memory/memory.usage_in_bytes": 50 * GIB,
    }
    root = v1(tmp_path, unlimited, "/", "/")
    assert probes.cores_allowed(root, affinity=16) == 16
    assert probes.memory(root) == probes.HostMemory(host=64 * GIB, limit=64 * GIB, available=60 * GIB)


def test_this_machine_reads_sensibly() -> None:
    now = probes.memory()
    assert 0 < now.available <= now.limit <= now.host
    assert 1 <= probes.cores_allowed() <= (os.cpu_count() or 1)
    shm = probes.shared_memory()
    assert shm is None or 0 <= shm.free <= shm.total
    assert probes.shared_memory(Path("/nowhere")) is None


FORKS = """
import os, sys
kept = bytearray(os.urandom(4096)) * (64 * 2**20 // 4096)
print(os.getpid(), flush=True)
sys.stdin.readline()
child = os.fork()
if child == 0:
    os.read(0, 1)
    os._exit(0)
print(child, flush=True)
os.waitpid(child, 0)
"""


def test_private_memory_does_not_count_what_a_fork_shares() -> None:
    size = 64 * 2**20
    command = [sys.executable, "-S", "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        alone = probes.private_memory(int(process.stdout.readline()))
        process.stdin.write("\n")
        child = probes.private_memory(int(process.stdout.readline()))
        process.stdin.close()
    assert alone is not None
    assert alone >= size
    assert child is not None
    assert 0 < child < size // 2
    assert probes.private_memory(process.pid) is None, "the process is gone"


# ---------------------------------------------------------------- GPUs

DRIVER = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned long long total, free, used; } Memory1;
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
int nvmlDeviceGetMemoryInfo(void *h, Memory1 *m) { m->total = 1000; m->free = 300; m->used = 700; return 0; }
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
    idle, busy = probes.gpus(library)
    assert idle == probes.Gpu(index=0, uuid="GPU-0-uuid", name="Card 0", total=2**37, used=0)
    assert (busy.uuid, busy.used, len(busy.users)) == ("GPU-1-uuid", 200, 100)
    assert busy.users[1] == probes.GpuUser(pid=1001, memory=2**33 + 1)
    assert busy.users[99] == probes.GpuUser(pid=1099, memory=None), "the driver did not say"
    assert probes.nvml_problem(library) is None
    assert ctypes.CDLL(library).opened() == 0, "what was opened is closed again"


def test_an_older_driver_has_the_older_call(tmp_path: Path) -> None:
    assert [(card.total, card.used) for card in probes.gpus(driver(tmp_path, "-DOLD"))] == [(1000, 700)] * 2


def test_no_cards_and_the_reason_where_the_driver_cannot_be_used(tmp_path: Path) -> None:
    broken = driver(tmp_path, "-UFAIL", "-DFAIL=18")
    assert probes.gpus(broken) == ()
    assert probes.nvml_problem(broken) == "NVML: Driver/library version mismatch (error 18)"
    assert probes.gpus(str(tmp_path / "absent.so")) == ()
    assert "absent.so" in (probes.nvml_problem(str(tmp_path / "absent.so")) or "")


# ---------------------------------------------------------------- the notebook this runs in


@pytest.mark.parametrize(
    ("environ", "modules", "name"),
    [
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "release"}, {}, "Kaggle"),
        ({"COLAB_RELEASE_TAG": "release"}, {}, "Colab"),
        ({}, {"google.colab": 1}, "Colab"),
        ({"DATABRICKS_RUNTIME_VERSION": "16.4"}, {}, "Databricks"),
        ({"SAGEMAKER_APP_TYPE": "jupyterlab"}, {}, "SageMaker"),
        ({"JUPYTERHUB_API_URL": "http://hub"}, {}, "JupyterHub"),
        ({"VSCODE_PID": "7"}, {}, "VS Code"),
        ({"VSCODE_PID": "7", "JPY_SESSION_NAME": "a.ipynb"}, {}, "Python"),
        ({}, {}, "Python"),
    ],
)
def test_environments(environ: dict[str, str], modules: dict[str, object], name: str) -> None:
    assert probes.environment(environ, modules) == name


def test_ipython_and_plain_python_are_told_apart() -> None:
    code = "from nbtrain.machine.probes import environment; print(environment({}))"
    for command, name in (("python", "Python"), ("IPython", "IPython")):
        module = [] if command == "python" else ["-m", "IPython", "--quick", "--colors=NoColor"]
        said = subprocess.run([sys.executable, *module, "-c", code], text=True, capture_output=True, check=True).stdout
        assert said.strip() == name


# ---------------------------------------------------------------- may this process be forked?

linux = pytest.mark.skipif(sys.platform != "linux", reason="threads and open files are read from /proc")


def in_a_process(where: Path, code: str, **environ: str) -> list[str]:
    """What `why_not_fork` says in a fresh process, at each `say()`."""
    script = where / "script.py"  # a file, because torch.jit reads the source of what it compiles
    script.write_text("from nbtrain.machine.probes import why_not_fork\ndef say(): print(why_not_fork())\n" + code)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(probes.__file__).parents[2]), "PYTHONWARNINGS": "ignore", **environ},
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.splitlines()


@linux
@pytest.mark.slow
def test_worker_threads_of_torch_forbid_a_fork_and_those_of_numpy_do_not(tmp_path: Path) -> None:
    before, imported, after, pools = in_a_process(
        tmp_path,
        "import numpy; a = numpy.ones((600, 600)); a @ a\n"
        "say()\n"
        "import torch; torch.set_num_threads(2)\n"
        "say()\n"
        "a = torch.ones(600, 600); a.relu_()\n"
        "say()\n"
        "@torch.jit.script\n"
        "def later(a):\n    return torch.jit.wait(torch.jit.fork(torch.relu, a))\n"
        "later(a)\n"
        "say()\n",
    )
    assert before == imported == "None"
    assert "(1 of OpenMP)" in after
    assert "`--start warm`" in after
    assert "of torch's own pools" in pools


@linux
@pytest.mark.slow
def test_torch_with_one_thread_may_be_forked_and_a_member_of_a_group_may_not(tmp_path: Path) -> None:
    alone, member = in_a_process(
        tmp_path,
        "import torch\n"
        "a = torch.ones(600, 600); a.relu_()\n"
        "say()\n"
        "import torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "say()\n"
        "dist.destroy_process_group()\n",
        OMP_NUM_THREADS="1",
    )
    assert alone == "None"
    assert "member of a process group" in member


@linux
def test_cuda_is_seen_by_the_device_that_it_keeps_open(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-uvm"
    device.touch()
    (tmp_path / "fd").mkdir()
    (tmp_path / "fd" / "0").symlink_to("/dev/null")
    (tmp_path / "fd" / "7").symlink_to("/dev/nvidiactl")  # NVML opens this one as well
    assert probes.cuda_initialised(tmp_path, {}, device) is None
    assert probes.why_not_fork(tmp_path, {}, device) is None
    (tmp_path / "fd" / "8").symlink_to(device)
    assert probes.cuda_initialised(tmp_path, {}, device) == "the CUDA driver"
    said = probes.why_not_fork(tmp_path, {}, device) or ""
    assert "CUDA is initialised in this kernel (by the CUDA driver)" in said


@linux
def test_a_device_that_this_process_opens_and_closes(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-uvm"
    assert probes.cuda_initialised(modules={}, device=device) is None
    with device.open("w"):
        assert probes.cuda_initialised(modules={}, device=device) == "the CUDA driver"
    assert probes.cuda_initialised(modules={}, device=device) is None


@linux
def test_without_the_device_no_open_file_is_looked_at(tmp_path: Path) -> None:
    """Asked twice for each cell, and a notebook may have a thousand files open."""
    called: list[object] = []
    sys.setprofile(lambda frame, event, what: called.append(what) if event == "c_call" else None)
    try:
        assert probes.cuda_initialised(modules={}, device=tmp_path / "nvidia-uvm") is None
    finally:
        sys.setprofile(None)
    assert os.readlink not in called
    assert os.listdir not in called


@linux
def test_where_a_sandbox_hides_what_threads_do_no_fork_is_risked(tmp_path: Path) -> None:
    maps = "7f00-7fff r-xp 00000000 00:00 0    /opt/torch/lib/libgomp-a34b3233.so.1"
    root = tree(tmp_path, {"maps": maps, "task/999999/comm": "python", "task/999998/comm": "ZMQbg/IO/0"})
    assert "(1 of unknown origin)" in (probes.why_not_fork(root, {}) or "")


def test_probes_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, nbtrain.machine.probes, nbtrain.machine.devices; "
        "print(sorted({'torch', 'numpy', 'IPython'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
