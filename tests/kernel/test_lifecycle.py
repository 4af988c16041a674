"""How ranks begin and end: with the kernel, whatever happens to it, and without a trace."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import nbtrain.engines._local.warm as warm
import nbtrain.machine.devices as devices
from nbtrain.base.errors import PoolError
from nbtrain.base.events import Event, Failed, RankState
from nbtrain.base.messages import KernelEnvironment
from nbtrain.base.specs import PoolSpec
from nbtrain.engines._local import scratch
from nbtrain.engines.base import Death
from nbtrain.engines.local import LocalPool
from nbtrain.machine.gpus import Gpu
from nbtrain.notebook.magics.line.parse import parse
from nbtrain.notebook.magics.line.resolve import Resolver
from nbtrain.notebook.report.exception_message import died
from tests.support.hygiene import GRACE, describe, gone_within
from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, START, TRAIN, Notebook

pytestmark = pytest.mark.kernel

PRIVATE = Path(tempfile.gettempdir())
"""conftest gives every kernel this one as XDG_RUNTIME_DIR."""


def left(pids: set[int], directories: set[Path]) -> list[str]:
    """Processes and files that should be gone."""
    alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
    return [describe(psutil.Process(pid)) for pid in alive] + [str(path) for path in directories if path.exists()]


def gone(pids: set[int], directories: set[Path]) -> None:
    assert gone_within(GRACE, lambda: left(pids, directories)) == []


def ours() -> set[Path]:
    return set(PRIVATE.glob("nbtrain-*"))


@pytest.mark.sample("warm")
@pytest.mark.parametrize("start", ["warm", "spawn"])
def test_a_kernel_that_shuts_down_or_restarts_leaves_nothing(kernel: Kernel, start: str) -> None:
    before = ours()
    notebook = Notebook(kernel)
    notebook(TRAIN)
    notebook(f"%%distributed --devices 2 --start {start}" + LOOP)
    pids, directories = {process.pid for process in kernel.children()}, ours() - before
    assert len(pids) >= 2
    assert len(directories) == 1
    kernel.manager.shutdown_kernel(now=False)
    gone(pids, directories)


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    yield made
    made("%distributed stop")


def test_loading_says_nothing_and_starts_no_ranks(notebook: Notebook) -> None:
    notebook("%unload_ext nbtrain")
    assert notebook("%load_ext nbtrain").outputs == []
    assert not notebook.running()


def test_start_stop_restart_and_status(notebook: Notebook) -> None:
    assert notebook("%distributed status").stdout.startswith("no ranks are running")
    assert notebook("%distributed stop").error is None
    notebook(TRAIN)
    notebook("%distributed start --devices 2")
    first = notebook.pids()
    assert len(first) == 2
    notebook("%%distributed" + LOOP)
    assert notebook.pids() == first
    status = notebook("%distributed status").stdout
    assert status.startswith("2 ranks · local, warm · gloo")
    for word in ("rank 0: cpu", "rank 1: cpu", "MB of its own", "resident: ", "model", "loader"):
        assert word in status
    notebook("%distributed restart")
    second = notebook.pids()
    assert len(second) == 2
    assert not set(first) & set(second)
    notebook("%%distributed" + LOOP)
    notebook("assert opt.state[model[0].weight]['step'] == 6")
    notebook("%distributed stop")
    gone({*first, *second}, set())
    assert not notebook.running()
    notebook("%%distributed" + LOOP)  # nothing was lost
    notebook("assert opt.state[model[0].weight]['step'] == 9")


@pytest.mark.thorough
def test_stop_while_ranks_print_is_heard(notebook: Notebook) -> None:
    """An interrupt that comes in the middle of a message must not make nonsense of what follows it."""
    for _ in range(4):
        cell = notebook.kernel.start(
            "%%distributed --devices 2 --monitor off\nprint('begun')\nwhile True: print('x' * 9_999)"
        )
        notebook.kernel.wait_for(lambda cell=cell: cell.stdout.count("x") > 200_000)
        notebook.kernel.interrupt()
        assert (error := notebook.kernel.wait(cell).error) is not None
        assert error.ename == "KeyboardInterrupt"
        assert "what the cell did until then is in the notebook" in error.evalue


@pytest.mark.thorough
def test_descriptors_do_not_pile_up(notebook: Notebook) -> None:
    """Pools come and go, cells send parcels: the kernel holds as many files open as before."""
    counts = []
    for _ in range(3):
        notebook(TRAIN)
        notebook("%%distributed --devices 2" + LOOP)
        notebook("%distributed stop")
        counts.append(opened(notebook.kernel.pid))
    assert not counts[2] - counts[0], (counts[0] - counts[2], counts[2] - counts[0])


def opened(pid: int) -> Counter[str]:
    """What its descriptors lead to, without what numbers it. A kernel writes its history when it likes."""
    found: Counter[str] = Counter()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "history.sqlite" not in (target := os.readlink(entry)):
                found[re.sub(r"\d+", "", target)] += 1
    return found


@pytest.mark.thorough
def test_idle_ranks_own_little(notebook: Notebook) -> None:
    """They share with the process they were forked from what they have not written to."""
    notebook("%%distributed --devices 2\npass")
    for pid in notebook.pids():
        assert psutil.Process(pid).memory_full_info().uss < 60e6


@pytest.mark.thorough
def test_ranks_sleep_between_cells(notebook: Notebook) -> None:
    notebook(TRAIN)
    notebook("%%distributed --devices 2" + LOOP)
    processes = [psutil.Process(pid) for pid in notebook.pids()]
    used = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(1)  # what is measured is that nothing happens in it
    assert all(sum(p.cpu_times()[:2]) - before < 0.1 for p, before in zip(processes, used, strict=True))


# -- pools by themselves -----------------------------------------------------------------


@pytest.fixture
def nursery() -> Iterator[None]:
    yield
    warm.close()


def heard(pool: LocalPool, kind: type, seconds: float = 30) -> list[Event | Death]:
    """What a pool says until something of this kind is among it."""
    found: list[Event | Death] = []
    until = time.monotonic() + seconds
    while not any(isinstance(one, kind) for one in found):
        assert time.monotonic() < until, found
        found += pool.poll(0.1)
    return found


def ready(pool: LocalPool) -> None:
    missing = {info.rank for info in pool.ranks}
    while missing:
        for event in heard(pool, RankState):
            assert not isinstance(event, Death | Failed), event
            if isinstance(event, RankState) and event.state == "ready":
                missing.remove(event.rank)


def test_a_killed_nursery_is_replaced(nursery: None) -> None:
    pool = LocalPool(PoolSpec())
    try:
        ready(pool)
        os.kill(warm.warm().process.pid, signal.SIGKILL)
        with pytest.raises(PoolError, match="Run the cell again"):
            heard(pool, Death)
    finally:
        pool.close()
    again = LocalPool(PoolSpec())
    try:
        ready(again)
    finally:
        again.close()


def test_a_nursery_that_was_stopped_goes_on_where_it_is_needed(nursery: None) -> None:
    def stop() -> None:
        os.kill(warm.warm().process.pid, signal.SIGSTOP)

    stop()
    pool = LocalPool(PoolSpec(devices=("cpu", "cpu")))
    try:
        ready(pool)
        stop()
        os.kill(pool.pids()[1], signal.SIGKILL)
        assert [event.rank for event in heard(pool, Death) if isinstance(event, Death)] == [1]
        stop()
        pool.regroup([1])
        ready(pool)
        stop()
    finally:
        pool.close()


def test_a_nursery_that_does_not_go_on_is_ended_and_said(nursery: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "PATIENCE", 0.6)
    kept = warm.warm()
    os.kill(kept.process.pid, signal.SIGSTOP)
    real = kept.process.send_signal  # as if a debugger held it:
    monkeypatch.setattr(kept.process, "send_signal", lambda number: number == signal.SIGCONT or real(number))
    with pytest.raises(PoolError, match=r"it was stopped, and did not go on\. Run the cell again"):
        pool = LocalPool(PoolSpec())
        try:
            heard(pool, Death)
        finally:
            pool.close()
    assert not psutil.pid_exists(kept.process.pid)
    assert warm.warm() is not kept


STOPPED = """
import os, signal
from nbtrain.engines._local.warm import warm
print(warm().process.pid, flush=True)
input()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_nursery_that_is_stopped_does_not_outlive_its_kernel() -> None:
    command = [sys.executable, "-c", STOPPED]
    with subprocess.Popen(command, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as kernel:
        assert kernel.stdin is not None
        assert kernel.stdout is not None
        nursed = psutil.Process(int(kernel.stdout.readline()))
        until = time.monotonic() + 30
        while nursed.memory_info().rss < 60e6 and time.monotonic() < until:  # then it imports torch
            time.sleep(0.02)
        nursed.suspend()
        kernel.stdin.write("\n")
    assert gone_within(10 * GRACE, lambda: left({nursed.pid}, set())) == []  # it is in the middle of an import


PIDS = next((path for path in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")) if os.access(path, os.W_OK)), None)


@pytest.mark.skipif(PIDS is None, reason="no cgroup may be made here")
def test_ranks_that_may_be_no_more_processes_are_named_and_start_when_they_may(nursery: None) -> None:
    assert PIDS is not None
    group, nursed = PIDS / f"nbtrain-{uuid.uuid4().hex}", warm.warm().process.pid
    group.mkdir()
    try:
        if not (group / "pids.max").exists():
            pytest.skip("the cgroups here do not count processes")
        (group / "cgroup.procs").write_text(str(nursed))
        for most, devices, what in (
            ("1", ("cpu", "cpu"), "ranks 0, 1 could not be started: there"),  # the nursery
            ("2", ("cpu",), "; it said:\nRuntimeError: can't start new thread\nThere"),
        ):
            (group / "pids.max").write_text(most)
            pool = LocalPool(PoolSpec(devices=devices))
            deaths = [event for event in heard(pool, Death) if isinstance(event, Death)]
            pool.close()
            assert f"{what} can be no more processes and threads: " in str(died(deaths, {}, {}, killer=False))
        (group / "pids.max").write_text("max")
        pool = LocalPool(PoolSpec(devices=("cpu", "cpu")))
        ready(pool)
        pool.close()
        assert warm.warm().process.pid == nursed
    finally:
        warm.close()
        gone_within(GRACE, lambda: (group / "cgroup.procs").read_text().split())
        group.rmdir()


@pytest.mark.thorough
def test_ranks_that_were_given_up_while_torch_was_imported_do_not_stay(nursery: None) -> None:
    """Stop, twice: the nursery forks later what nobody wants any more, and the next pool is asked for meanwhile."""
    kept = warm.warm()
    os.kill(kept.process.pid, signal.SIGSTOP)  # it imports for as long as this test likes
    first = LocalPool(PoolSpec(devices=("cpu", "cpu")))
    first.close(kill=True)
    second = LocalPool(PoolSpec())
    try:
        os.kill(kept.process.pid, signal.SIGCONT)
        ready(second)
        mine = second.pids()
        assert list(mine) == [0]
        (info,) = second.ranks
        assert info.world_size == 1
        nursed = psutil.Process(kept.process.pid)
        assert gone_within(GRACE, lambda: [c.pid for c in nursed.children() if c.pid not in mine.values()]) == []
        assert not [event for event in second.poll(0.1) if isinstance(event, Death)]
    finally:
        second.close()


@pytest.mark.thorough
def test_a_scratch_process_answers_or_is_gone(nursery: None) -> None:
    waits: list[float] = []

    def ask(job: Callable[[Any], Any], payload: Any, seconds: float = 30) -> Any:
        environment = KernelEnvironment(environ=dict(os.environ) | {"ASKED": "here"})
        return scratch.ask(job, payload, environment, seconds, lambda: waits.append(time.monotonic()))

    kept = warm.warm()
    assert ask(sum, [1, 2]) == 3
    assert len(waits) <= 1, "while torch was imported"
    assert ask(os.getenv, "ASKED") == "here"
    began = time.monotonic()
    assert ask(time.sleep, 60, 0.3) is None
    assert ask(os._exit, 3) is None
    assert time.monotonic() - began < 10
    assert gone_within(GRACE, lambda: [str(c.pid) for c in psutil.Process(kept.process.pid).children()]) == []
    assert ask(eval, "__import__('os').kill(__import__('os').getppid(), 9)") is None


@pytest.mark.sample("warm")
@pytest.mark.parametrize("start", ["warm", "spawn"])
def test_a_rank_that_cannot_start_says_why(nursery: None, start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set after the nursery was started, as a notebook's first cell may."""
    if start == "warm":
        warm.warm()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    pool = LocalPool(PoolSpec(start=start, devices=("cpu", "cpu")))
    try:
        found = heard(pool, Death)
    finally:
        pool.close(kill=True)
    failed = [event for event in found if isinstance(event, Failed)]
    assert "nope" in failed[0].text
    assert any(isinstance(one, Death) and "exit code 1; it said:" in str(one) and "nope" in str(one) for one in found)


def test_an_interpreter_that_does_not_come_up_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('this torch is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = LocalPool(PoolSpec(start="spawn"))
    try:
        deaths = [one for one in heard(pool, Death) if isinstance(one, Death)]
    finally:
        pool.close(kill=True)
    assert "this torch is broken" in str(deaths[0])


@pytest.mark.thorough
def test_ranks_take_their_place_in_the_environment_of_the_moment(kernel: Kernel) -> None:
    """Cards and network are settled before the first cell: what was set or dropped after %load_ext counts."""
    kernel.run("import os; os.environ['NCCL_SOCKET_IFNAME'] = 'old0'")
    notebook = Notebook(kernel, first="")
    notebook("os.environ['GLOO_SOCKET_IFNAME'] = 'nope0'; del os.environ['NCCL_SOCKET_IFNAME']")
    assert "nope0" in notebook.fails("%%distributed --devices 2\npass").traceback
    notebook("os.environ['GLOO_SOCKET_IFNAME'] = 'lo'")
    notebook("%%distributed --devices 2\nimport os\nused = os.environ['NCCL_SOCKET_IFNAME']")
    assert notebook("print(used)").stdout != "old0\n"
    notebook("%distributed stop")


@pytest.mark.thorough
@pytest.mark.parametrize("start", ["warm", "spawn"])
def test_ranks_know_where_temporary_files_go(kernel: Kernel, start: str) -> None:
    """Python tries it with a file when it is first asked. In a rank that may be torch, about to tell of a dead loader
    worker, and torch is interrupted by the signal of that death: the file would stay."""
    kernel.run("import torch._dynamo")  # with its cache settled, importing it in the nursery asks no more
    notebook = Notebook(kernel, first="")
    notebook(f"%%distributed --devices 2 --start {start}\nimport tempfile\nplace = tempfile.tempdir")
    assert notebook("print(place)").stdout == f"{PRIVATE}\n"
    notebook("%distributed stop")


@pytest.mark.thorough
def test_other_cards_are_another_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda:0 is another card after CUDA_VISIBLE_DEVICES was changed between two cells."""
    cards = tuple(Gpu(index=index, uuid=f"GPU-{index}", name="H100") for index in range(3))

    def here() -> devices.Machine:
        return devices.Machine(cores=2, gpus=cards, visible=os.environ["CUDA_VISIBLE_DEVICES"], leases=tmp_path)

    monkeypatch.setattr(devices, "here", here)
    resolver, asked = Resolver(), parse("--devices 1", {})
    found = []
    for visible in ("0,1", "2,1", "2"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found.append(resolver.pool(asked))
    assert [(pool.devices, pool.uuids) for pool in found] == [
        (("cuda:0",), ("GPU-0",)), (("cuda:0",), ("GPU-2",)), (("cuda:0",), ("GPU-2",)),
    ]  # fmt: skip
    assert found[0] != found[1] == found[2]


def test_a_pool_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before, descriptors = ours(), psutil.Process().num_fds()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        LocalPool(PoolSpec(start="spawn"))
    assert ours() == before
    assert psutil.Process().num_fds() == descriptors


ASKED = "import sys\nloaded = 'torch._dynamo' in sys.modules"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("before", "cell", "waits"),
    [
        ("", "", False),
        ("import torch", "", True),
        ("", "# optimizers need the compiler\n", True),
    ],
    ids=["nothing to train", "a notebook with torch", "an optimizer"],
)
def test_first_ranks_wait_for_the_compiler_only_where_something_may_be_trained(
    kernel: Kernel, before: str, cell: str, waits: bool
) -> None:
    """It takes as long to import as torch. Who needs it all the same finds it, and so do ranks that are made later."""
    kernel.run(before)
    notebook = Notebook(kernel, first="")
    notebook(f"%%distributed --devices 2\n{cell}{ASKED}")
    assert notebook("print(loaded)").stdout == f"{waits}\n"
    notebook(START)
    notebook(TRAIN)
    notebook("%%distributed --devices 2 --strategy fsdp\n" + LOOP)
    notebook("%%distributed --devices 1\n" + ASKED)
    assert notebook("print(loaded)").stdout == "True\n"
    notebook("%distributed stop")
