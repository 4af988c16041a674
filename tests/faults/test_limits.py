"""Memory, disks, shared memory and descriptors that run out: the cell fails or works, and says what was missing;
the notebook is as before, and the next cell works.

FAULTS=all plays more of them, with both ways to start. What the machine does not let a test do is left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.hygiene import gone_within, marked
from tests.support.kernels import MARK, Kernel, running_kernel
from tests.support.notebook import TRAIN, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.limit(300)]

ALL = os.environ.get("FAULTS") == "all"
STARTS = ("warm", "spawn") if ALL else ("warm",)
often = pytest.mark.skipif(not ALL, reason="FAULTS=all plays it")

CGROUP = Path("/sys/fs/cgroup/memory")
"""of version 1, where it is mounted"""
MORE = 600 << 20
"""Bytes that everything together may still take in the group."""

BEGIN = """
import hashlib, os, resource
def state():
    tensors = [*model.state_dict().values(), *(v for s in opt.state.values() for v in s.values())]
    return hashlib.blake2b(b''.join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
"""
STEPS = """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
"""


class Limited(Notebook):
    """With two ranks that have trained for a while."""

    def __init__(self, kernel: Kernel, start: str = "warm") -> None:
        super().__init__(kernel)
        self.magic = f"%%distributed --devices 2 --start {start} --monitor off\n"
        self("torch.set_num_threads(1)\n" + BEGIN + TRAIN)

    def train(self) -> str:
        """A cell that works; what it has made of the weights."""
        self(self.magic + STEPS)
        return self.state()

    def state(self) -> str:
        return self("print(state())").stdout

    def changed_nothing(self, cell: str) -> str:
        """The error of a cell that has taken steps, as it is shown; the next cell works."""
        before = self.state()
        error = self.fails(self.magic + STEPS + cell)
        assert self.state() == before
        assert self.train() != before
        return f"{error.evalue}\n{error.traceback}"


@pytest.fixture(params=STARTS)
def notebook(request: pytest.FixtureRequest, shared_kernel: Kernel) -> Iterator[Limited]:
    made = Limited(shared_kernel, request.param)
    made.train()
    yield made
    made("%distributed stop")


# -- memory ------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    "taking", ["bytearray(1 << 32)", "torch.ones(1 << 30)", "[torch.ones(1 << 22) for _ in range(1 << 10)]"]
)
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"] if ALL else ["RLIMIT_AS"])
def test_no_memory_for_an_object(notebook: Limited, limit: str, taking: str) -> None:
    before = notebook.pids()
    said = notebook.changed_nothing(
        f"had = resource.getrlimit(resource.{limit})\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.{limit}, (used + (512 << 20), had[1]))\n"
        f"try:\n    if rank: {taking}\n    reduce(1.0)\n"
        f"finally: resource.setrlimit(resource.{limit}, had)"
    )
    assert "raised on rank 1" in said
    assert "MemoryError" in said or "can't allocate memory" in said
    assert "Smaller batches need less memory" in said
    assert notebook.pids() == before


@contextmanager
def memory_group(mark: str) -> Iterator[None]:
    """A part of the group that this test is in, with little memory, for all processes of one kernel."""
    own = [row.split(":")[2] for row in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in row]
    if not own or not os.access(parent := CGROUP / own[0].lstrip("/"), os.W_OK):
        pytest.skip("no memory cgroup of version 1 that this test may divide")
    group = parent / f"nbtrain-{uuid.uuid4().hex[:8]}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(MORE))
        with suppress(OSError):  # no swap, or none that is counted
            (group / "memory.swappiness").write_text("0")
        for process in marked(MARK, mark):
            (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:

        def inside() -> list[str]:
            members = (group / "cgroup.procs").read_text().split()
            for pid in members:
                with suppress(OSError):  # it has ended since
                    (parent / "cgroup.procs").write_text(pid)
            return members

        gone_within(10, inside)
        group.rmdir()


@pytest.mark.thorough
@pytest.mark.parametrize("start", STARTS)
def test_the_out_of_memory_killer(kernel: Kernel, start: str) -> None:
    """It takes the rank that has most."""
    notebook = Limited(kernel, start)
    notebook.train()
    first, second = notebook.pids()
    with memory_group(kernel.mark):
        said = notebook.changed_nothing(
            "import time\n"
            "if rank:\n    print('I am hungry', flush=True); time.sleep(0.5)\n"
            "    food = [bytearray(os.urandom(1 << 20)) for _ in range(1 << 12)]\n"
            "reduce(1.0)"
        )
    assert f"rank 1 (process {second}) was ended by SIGKILL" in said
    assert "out-of-memory killer" in said
    assert "I am hungry" in said
    assert re.search(r"rank 1 had [\d.]+ .B of [\d.]+ .B at most", said), said
    assert "--accumulate" in said
    now = notebook.pids()
    assert now[0] == first
    assert now[1] != second


# -- disks and shared memory -------------------------------------------------------------


def mounted(*mounts: str) -> list[str]:
    """The beginning of a command that sees these: `size=64k /dev/shm`. Nobody else does."""
    lines = [f"mount -t tmpfs -o {options} none {place}" for options, place in map(str.split, mounts)]
    within = ["unshare", "-rm", "sh", "-ec", "\n".join([*lines, 'exec "$@"']), "sh"]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    if (tried := subprocess.run([*within, "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"this machine lets nobody mount anything for himself: {tried.stderr.strip()}")
    return within


FILL = """
with open('{0}/filling', 'wb', buffering=0) as file:
    try:
        while True: file.write(bytes(4096))
    except OSError as error: print(error)
"""
HIDE = "".join(f"assert os.system('mount -t tmpfs -o size=256k none {place}') == 0\n" for place in ("/tmp", "/var/tmp"))


@pytest.mark.thorough
@pytest.mark.parametrize("start", STARTS)
def test_a_full_disk(start: str) -> None:
    """Where temporary files, sockets and the notebook's own files go."""
    place = tempfile.mkdtemp(prefix="full-")
    try:
        within = mounted(f"size=1m {place}")
        with running_kernel(*within, TMPDIR=place, XDG_RUNTIME_DIR=place) as kernel:
            kernel.run(f"import os; os.chdir({place!r})")
            assert "No space left" in kernel.run(FILL.format(place)).stdout
            notebook = Limited(kernel, start)
            notebook.train()
            said = notebook.changed_nothing("torch.save(model.state_dict(), 'model.pt')")
            assert "raised on rank 0" in said
            assert "the disk is full" in said
            said = notebook.changed_nothing("torch.save(model.state_dict(), '/dev/full')")
            assert "the disk is full" in said
            said = notebook.changed_nothing("with open('model.txt', 'w') as file: file.write('x' * 100_000)")
            assert "No space left on device" in said
            left = kernel.run("print(sorted(os.listdir()))").stdout
            assert ".tmp" not in left
            assert "model.pt" not in left
            no_place_at_all(notebook)
    finally:
        os.rmdir(place)


def no_place_at_all(notebook: Limited) -> None:
    """No directory can be made for sockets anywhere: that is said, and once there is one all goes on."""
    before = notebook.state()
    notebook("%distributed stop")
    notebook("os.chdir('/tmp')")
    notebook(HIDE + FILL.format("/tmp") + FILL.format("/var/tmp"))
    said = notebook.fails(notebook.magic + STEPS).evalue
    assert "there is no directory for the ranks' sockets" in said
    assert "/tmp: No space left on device" in said
    assert "Set XDG_RUNTIME_DIR or TMPDIR" in said
    assert notebook.state() == before
    notebook("os.chdir('/'); assert os.system('umount /tmp /var/tmp') == 0")
    notebook.train()


@pytest.mark.thorough
@pytest.mark.parametrize("start", STARTS)
def test_hardly_any_shared_memory(start: str) -> None:
    """64 kB hold less than the locks of a few loader workers, which are not ours; nothing of ours lies there."""
    with running_kernel(*mounted("size=64k /dev/shm")) as kernel:
        notebook = Limited(kernel, start)
        notebook.train()
        weights_travel(notebook)
        said = notebook.changed_nothing("for x, y in DataLoader(data, batch_size=8, num_workers=2): pass")
        assert "/dev/shm of 65.5 kB is full" in said
        assert "num_workers=0" in said


def weights_travel(notebook: Limited) -> None:
    """100 MB, both ways."""
    notebook("big = nn.Linear(5000, 5000, bias=False)\nwith torch.no_grad(): big.weight.fill_(1.0)")
    notebook(notebook.magic + "with torch.no_grad(): big.weight += float(big.weight[0, 0])")
    notebook("assert bool((big.weight == 2.0).all()); del big")


# -- descriptors -------------------------------------------------------------------------


@pytest.mark.thorough
@often
@pytest.mark.parametrize("start", STARTS)
def test_few_descriptors(kernel: Kernel, start: str) -> None:
    """256 do for several ranks, loader workers and many objects; a cell that takes them all fails alone."""
    kernel.run("from resource import *\nsetrlimit(RLIMIT_NOFILE, (256, getrlimit(RLIMIT_NOFILE)[1]))")
    notebook = Limited(kernel, start)
    notebook.magic = notebook.magic.replace("--devices 2", "--devices 4")
    notebook.train()
    notebook(notebook.magic + "for x, y in DataLoader(data, num_workers=2, batch_size=16): pass")
    notebook("many = [torch.randn(1000) for _ in range(500)]")
    notebook(notebook.magic + "for one in many: one += 1")
    said = notebook.changed_nothing("taken = [open('/dev/null') for _ in range(1000)]")
    assert "Too many open files" in said


@pytest.mark.thorough
def test_no_descriptors(shared_kernel: Kernel) -> None:
    """What is missing is said in one line, and how it is had; with it, the same cell works."""
    notebook = Limited(shared_kernel)
    notebook("%distributed stop")
    notebook("had = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
             "resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir('/proc/self/fd')) + 6, had[1]))")  # fmt: skip
    said = notebook.refused(notebook.magic + STEPS)
    notebook("resource.setrlimit(resource.RLIMIT_NOFILE, had)")
    assert "PoolError: the notebook has reached its limit of open files" in said
    assert "ulimit -n" in said
    notebook.train()
    notebook("%distributed stop")
