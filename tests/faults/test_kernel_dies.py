"""The kernel is killed or restarted at any moment: within two seconds nothing of it is left.

FAULTS=all plays fifty moments, SEED=n others than the usual ones.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.hygiene import GRACE, LIBRARY_FILES, describe, gone_within, marked
from tests.support.kernels import MARK, Kernel, Result
from tests.support.notebook import TRAIN, Notebook

pytestmark = pytest.mark.kernel

SEED = int(os.environ.get("SEED", "0"))
MOMENTS = 50 if os.environ.get("FAULTS") == "all" else 4
PRIVATE = Path(tempfile.gettempdir())
"""conftest gives it to every kernel as TMPDIR and XDG_RUNTIME_DIR."""

LISTENS = "0A"
"""in /proc/net/tcp"""


@dataclass(frozen=True)
class Phase:
    """What the kernel is doing when it dies: so many seconds at most after `begun`."""

    cell: str
    begun: Callable[[Kernel, Result], object]
    seconds: float
    ready: bool = True
    """ranks are there before the cell"""
    after: Callable[[Kernel], object] = lambda kernel: None
    """what is done to it first"""


def said(word: str) -> Callable[[Kernel, Result], object]:
    return lambda kernel, cell: word in cell.stdout


def at_once(kernel: Kernel, cell: Result) -> bool:
    return True


def ranks_of(kernel: Kernel) -> list[psutil.Process]:
    """What leads a process group of its own and is no nursery: fresh interpreters, and a nursery's forks."""
    found = []
    for process in kernel.children():
        with suppress(psutil.Error, OSError):
            line = " ".join(process.cmdline())
            forked = "nursery" in line and "nursery" in " ".join((process.parent() or process).cmdline())
            if os.getpgid(process.pid) == process.pid and (forked or "nbtrain.worker" in line):
                found.append(process)
    return found


def stop_one(kernel: Kernel) -> None:
    """The last one, as `kill -STOP` would."""
    os.kill(ranks_of(kernel)[-1].pid, signal.SIGSTOP)


MAGIC = "%%distributed --devices 2 --start {start} --monitor off\n"
STEPS = (
    MAGIC
    + """
import time
while True:
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); opt.step(); opt.zero_grad()
    print('begun')
"""
)
PHASES = {
    "a nursery imports": Phase("%load_ext nbtrain", at_once, 3.0, ready=False),
    "ranks start": Phase(MAGIC + "pass", at_once, 2.0, ready=False),
    "ranks are there and not ready": Phase(
        MAGIC + "pass", lambda kernel, cell: cell.done or len(ranks_of(kernel)) == 2, 3.0, ready=False
    ),
    "objects are sent": Phase(
        "things = [[float(i)] for i in range(300_000)]\n---\n" + MAGIC + "len(things)", at_once, 1.5
    ),
    "steps are taken": Phase(STEPS, said("begun"), 1.0),
    "ranks wait in a collective": Phase(
        MAGIC + "import time\nif rank: time.sleep(600)\nprint('begun'); reduce(1.0)", said("begun"), 1.0
    ),
    "weights come home": Phase(
        "big = [torch.zeros(1_000_000) for _ in range(20)]\n---\n"
        + MAGIC + "for one in big: one += 1\nmore = [[float(i)] for i in range(100_000)]\nprint('begun')",
        said("begun"), 1.0,
    ),
    "pieces come home": Phase(
        "wide = nn.Linear(2000, 2000)\nsgd = torch.optim.SGD(wide.parameters(), 0.1, momentum=0.9)\n---\n"
        + MAGIC.replace("--devices", "--strategy fsdp --devices")
        + "wide(torch.ones(1, 2000)).sum().backward(); sgd.step()\nprint('begun')",
        said("begun"), 1.0,
    ),
    "nothing runs": Phase("1", lambda kernel, cell: cell.done, 0.7),
    "a rank is stopped": Phase(STEPS, said("begun"), 0.5, after=stop_one),
    "workers and subprocesses run": Phase(
        MAGIC + """
import subprocess, time
process = subprocess.Popen(['sh', '-c', 'sleep 600 & sleep 600'])
for x, y in DataLoader(data, num_workers=2):
    print('begun')
    time.sleep(600)
""", said("begun"), 0.5
    ),
    "the cell is being stopped": Phase(
        MAGIC + """
import time
while True:
    try:
        print('begun'); time.sleep(600)
    except KeyboardInterrupt: pass
""",
        said("begun"), 4.0, after=Kernel.interrupt,
    ),
}  # fmt: skip

DEATHS: dict[str, Callable[[Kernel], object]] = {
    "is killed": Kernel.kill,
    "is restarted": lambda kernel: kernel.manager.restart_kernel(now=False),
    "is restarted now": lambda kernel: kernel.manager.restart_kernel(now=True),
}


def moments() -> list[tuple[str, str, str, float]]:
    """Each phase comes with each way to start before any comes a second time; a kill is what a test is for mostly."""
    draw = random.Random(SEED)
    drawn: list[tuple[str, str, str, float]] = []
    while len(drawn) < MOMENTS:
        turns = [(phase, start) for phase in PHASES for start in ("warm", "spawn")]
        draw.shuffle(turns)
        drawn += [(phase, start, draw.choice(("is killed", *DEATHS)), draw.random()) for phase, start in turns]
    return drawn[:MOMENTS]


@pytest.mark.sample(first=1)
@pytest.mark.parametrize(("phase", "start", "death", "when"), moments())
def test_nothing_survives_the_kernel(kernel: Kernel, phase: str, start: str, death: str, when: float) -> None:
    played = PHASES[phase]
    before = files()
    *first, last = [cell.strip("\n").format(start=start) for cell in played.cell.split("---")]
    if played.ready:
        notebook = Notebook(kernel)
        notebook("torch.set_num_threads(1)\n" + TRAIN)
        for cell in (*first, MAGIC.format(start=start) + "pass"):
            notebook(cell)
    elif last != "%load_ext nbtrain":
        kernel.run("%load_ext nbtrain")
    running = kernel.start(last)
    kernel.wait_for(lambda: played.begun(kernel, running))
    played.after(kernel)
    time.sleep(when * played.seconds)  # the moment is drawn
    listening = listeners(marked(MARK, kernel.mark))
    DEATHS[death](kernel)
    new = kernel.manager.provisioner.pid if death != "is killed" else None  # type: ignore[union-attr]
    assert gone_within(GRACE, lambda: left(kernel.mark, new, before, listening)) == []
    if new is not None:
        kernel.client.wait_for_ready(timeout=60)
        assert kernel.run("print(6 * 7)").stdout == "42\n"


def left(mark: str, new: int | None, before: set[Path], listening: set[int]) -> list[str]:
    """Of a kernel that is gone. `new`: the one that has taken its place."""
    found = [f"process {describe(process)}" for process in marked(MARK, mark) if process.pid != new]
    found += [f"file {path}" for path in files() - before]
    found += [f"socket {path}" for path in unix_sockets()]
    if listening:
        found += [f"TCP listener, inode {inode}" for inode in listening & tcp_inodes()]
    return found


def files() -> set[Path]:
    """Whatever lies where nbtrain may write, but what other test sessions on this machine keep in shared memory."""
    shared = {path for path in Path("/dev/shm").glob("*") if "torch" in path.name or "nbtrain" in path.name}
    private = {path for path in PRIVATE.glob("*") if not path.name.startswith(LIBRARY_FILES)}
    return private | {path for path in shared if not held(path)}


def held(path: Path) -> bool:
    """By a process that is not of ours: a test session beside this one."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if any(str(path) in one.path for one in process.memory_maps(grouped=True)):
                return os.environ.get("NBTRAIN_TEST_SESSION") != process.environ().get("NBTRAIN_TEST_SESSION")
    return False


def unix_sockets() -> list[str]:
    """Those with a path of ours."""
    rows = Path("/proc/net/unix").read_text().splitlines() if Path("/proc/net/unix").exists() else []
    return [row.split()[-1] for row in rows if str(PRIVATE) in row]


def listeners(processes: Iterable[psutil.Process]) -> set[int]:
    """Inodes of the TCP sockets that these listen on."""
    inodes = set()
    for process in processes:
        with suppress(OSError):
            for entry in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    target = os.readlink(entry)
                    if target.startswith("socket:["):
                        inodes.add(int(target[8:-1]))
    return inodes & tcp_inodes()


def tcp_inodes() -> set[int]:
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            rows = [row.split() for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
            found |= {int(row[9]) for row in rows if row[3] == LISTENS}
    return found
