"""What this process may use: read from trees of files as containers show them, and from real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from nbtrain.machine import host
from tests.support.file_tree import tree

GIB = 2**30
V1_UNLIMITED = "9223372036854771712"


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
    assert host.cores_allowed(v2(tmp_path, {"cpu.max": quota}), affinity=8) == cores


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
    assert host.cores_allowed(root, affinity=64) == 3
    assert host.memory(root) == host.HostMemory(host=64 * GIB, limit=8 * GIB, available=4 * GIB)


@pytest.mark.parametrize(("own", "top", "inside"), [
    ("/docker/ab12", "/docker/ab12", ""),  # Docker
    ("/", "/", ""),  # a cgroup namespace
    ("/jobs/7", "/", "jobs/7/"),  # SLURM
    ("/docker/ab12/sub", "/docker/ab12", "sub/"),
    ("/docker/ab123", "/docker/ab12", ""),  # a path that only looks alike
    ("/../../other", "/", ""),
])  # fmt: skip
def test_version_one_wherever_the_cgroup_is_mounted(tmp_path: Path, own: str, top: str, inside: str) -> None:
    files = {
        f"cpu,cpuacct/{inside}cpu.cfs_quota_us": 250000,
        f"cpu,cpuacct/{inside}cpu.cfs_period_us": 100000,
        f"memory/{inside}memory.limit_in_bytes": 4 * GIB,
        f"memory/{inside}memory.usage_in_bytes": 3 * GIB,
        f"memory/{inside}memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
    }
    root = v1(tmp_path, files, own, top)
    assert host.cores_allowed(root, affinity=16) == 3
    assert host.memory(root) == host.HostMemory(host=64 * GIB, limit=4 * GIB, available=2 * GIB)


def test_kills_for_lack_of_memory_are_those_of_this_container(tmp_path: Path) -> None:
    machine = {"proc/vmstat": "pgfault 9\noom_kill 7"}
    events = "low 0\noom 3\noom_kill 2"
    assert host.out_of_memory_kills(tree(v2(tmp_path / "two", {"memory.events": events}), machine)) == 2
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 5"
    one = v1(tmp_path / "one", {"memory/memory.oom_control": control}, "/", "/")
    assert host.out_of_memory_kills(tree(one, machine)) == 5
    assert host.out_of_memory_kills(tree(one, machine), anywhere=True) == 7
    assert host.out_of_memory_kills(tree(tmp_path / "none", machine)) == 7
    assert host.out_of_memory_kills(tree(tmp_path / "nobody", {"proc/stat": ""})) is None


def test_no_limit_is_the_machine(tmp_path: Path) -> None:
    unlimited = {
        "cpu,cpuacct/cpu.cfs_quota_us": -1,
        "cpu,cpuacct/cpu.cfs_period_us": 100000,
        "memory/memory.limit_in_bytes": V1_UNLIMITED,
        "memory/memory.usage_in_bytes": 50 * GIB,
    }
    root = v1(tmp_path, unlimited, "/", "/")
    assert host.cores_allowed(root, affinity=16) == 16
    assert host.memory(root) == host.HostMemory(host=64 * GIB, limit=64 * GIB, available=60 * GIB)


def test_this_machine_reads_sensibly() -> None:
    now = host.memory()
    assert 0 < now.available <= now.limit <= now.host
    assert 1 <= host.cores_allowed() <= (os.cpu_count() or 1)
    shm = host.shared_memory()
    assert shm is None or 0 <= shm.free <= shm.total
    assert host.shared_memory(Path("/nowhere")) is None


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
        alone = host.private_memory(int(process.stdout.readline()))
        process.stdin.write("\n")
        child = host.private_memory(int(process.stdout.readline()))
        process.stdin.close()
    assert alone is not None
    assert alone >= size
    assert child is not None
    assert 0 < child < size // 2
    assert host.private_memory(process.pid) is None, "the process is gone"


@pytest.mark.parametrize(("environ", "modules", "name"), [
    ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "release"}, {}, "Kaggle"),
    ({"COLAB_RELEASE_TAG": "release"}, {}, "Colab"),
    ({}, {"google.colab": 1}, "Colab"),
    ({"DATABRICKS_RUNTIME_VERSION": "16.4"}, {}, "Databricks"),
    ({"SAGEMAKER_APP_TYPE": "jupyterlab"}, {}, "SageMaker"),
    ({"JUPYTERHUB_API_URL": "http://hub"}, {}, "JupyterHub"),
    ({"VSCODE_PID": "7"}, {}, "VS Code"),
    ({"VSCODE_PID": "7", "JPY_SESSION_NAME": "a.ipynb"}, {}, "Python"),
    ({}, {}, "Python"),
])  # fmt: skip
def test_environments(environ: dict[str, str], modules: dict[str, object], name: str) -> None:
    assert host.environment_of(environ, modules) == name


def test_ipython_and_plain_python_are_told_apart() -> None:
    code = "from nbtrain.machine.host import environment_of; import sys; print(environment_of({}, sys.modules))"
    for command, name in (("python", "Python"), ("IPython", "IPython")):
        module = [] if command == "python" else ["-m", "IPython", "--quick", "--colors=NoColor"]
        said = subprocess.run([sys.executable, *module, "-c", code], text=True, capture_output=True, check=True).stdout
        assert said.strip() == name


linux = pytest.mark.skipif(sys.platform != "linux", reason="threads and open files are read from /proc")


@pytest.mark.parametrize(("text", "now", "starting", "told"), [
    ("RuntimeError: can't start new thread", 5, False, True),
    ("unable to lock file, errno = 11, error message = 'Resource temporarily unavailable'", 5, False, False),
    ("[Errno 11] Resource temporarily unavailable", 95, False, True),
    ("[Errno 11] Resource temporarily unavailable", 5, True, True),
    ("no such file", 95, True, False),
])  # fmt: skip
def test_an_error_means_that_there_can_be_no_more_processes(
    text: str, now: int, starting: bool, told: bool, tmp_path: Path
) -> None:
    group = {"pids.max": 100_000, "pids.current": 99_900 + now}
    root = v2(tmp_path, group)
    assert bool(host.of_processes(text, root, starting)) is told


def test_who_goes_on_is_seen_where_the_system_says_it(tmp_path: Path) -> None:
    assert host.progress(os.getpid(), tmp_path) == (False, None)
    if sys.platform == "linux":
        stopped, done = host.progress(os.getpid())
        assert not stopped
        assert done is not None
