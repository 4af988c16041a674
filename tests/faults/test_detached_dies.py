"""A detached run, and its kernel, its keeper, the keeper's nursery or a rank ended at any moment. What is there of it
is what an undisturbed run has, to the last bit, or a sentence says why there is nothing; before it was taken over
nothing is left.

Then a homecoming that is cut short, 600 MB of output, and a server that is stopped.

FAULTS=all plays forty moments, SEED=n others than the usual ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient

from nbtrain.annexes.detached.detached_run import DetachedRun, lost
from nbtrain.annexes.detached.run_folders import GOES_ON, RunFolder, every_run
from tests.support.hygiene import gone_within
from tests.support.kernels import Kernel, private_environment, private_home, running_kernel
from tests.support.notebook import START, TRAIN, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.limit(180)]

SEED = int(os.environ.get("SEED", "0"))
MOMENTS = 40 if os.environ.get("FAULTS") == "all" else 4
LASTS = 3.0
"""seconds from Enter until after the run's end, about"""
STEPS = 36
MAKE = f"import time; torch.set_num_threads(1); torch.manual_seed(3); {TRAIN}; losses, sums = [], []"
CELL = """%%distributed --devices 2 --monitor off {options}
torch.manual_seed(5)
for epoch in range(12):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); opt.step(); opt.zero_grad()
        losses.append(loss.item())
        sums.append(sum(p.double().sum().item() for p in model.parameters()))
        time.sleep(0.02)
"""


def keeper(run: RunFolder) -> psutil.Process | None:
    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        return psutil.Process(int((run.path / "lock").read_text().split()[0])) if run.is_kept else None
    return None


def end(run: RunFolder, depth: int) -> None:
    """Kill the keeper (0), its nursery (1) or a rank (2), if it is there."""
    found = keeper(run)
    with suppress(IndexError, psutil.NoSuchProcess):
        for _ in range(depth):
            found = found and found.children()[-1]
        if found is not None:
            found.kill()


def ask_all(run: RunFolder) -> None:
    """As who ends a session or a job does."""
    found = keeper(run)
    for process in [found, *found.children(recursive=True)] if found is not None else ():
        with suppress(psutil.NoSuchProcess):
            process.terminate()


def close_kernel(kernel: Kernel) -> None:
    kernel.manager.shutdown_kernel(now=False)


def restart_kernel(kernel: Kernel) -> None:
    kernel.manager.restart_kernel(now=False)


ENDS: dict[str, Callable[[Kernel], None]] = {
    "the kernel": lambda kernel: os.kill(kernel.pid, signal.SIGKILL), "the kernel, shut down": close_kernel,
    "the kernel, started anew": restart_kernel,
}  # fmt: skip
VICTIMS: dict[str, Callable[[RunFolder], None] | None] = {
    "the kernel": None,
    "a rank": lambda run: end(run, 2),
    "the keeper": lambda run: end(run, 0),
    "all, by a word": ask_all,
    "its nursery": lambda run: end(run, 1), "the kernel, shut down": None, "the kernel, started anew": None,
}  # fmt: skip


def moments() -> list[tuple[str, float]]:
    """Each comes before any comes a second time."""
    draw = random.Random(SEED)
    return [(victim, draw.random()) for _ in range(MOMENTS) for victim in VICTIMS][:MOMENTS]


@pytest.fixture(scope="module")
def undisturbed() -> tuple[list[float], list[float]]:
    with running_kernel() as kernel:
        notebook = Notebook(kernel)
        notebook(MAKE)
        notebook(CELL.format(options=""))
        losses, sums = json.loads(notebook("import json; print(json.dumps([losses, sums]))").stdout)
    assert len(losses) == STEPS
    return losses, sums


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("NBTRAIN_RUNS", str(tmp_path / "runs"))
    yield
    for run in every_run():
        end(run, 0)


@pytest.mark.sample(first=2)
@pytest.mark.parametrize(("victim", "when"), moments())
def test_it_is_whole_or_said(
    undisturbed: tuple[list[float], list[float]], runs: None, kernel_factory: Callable[..., Kernel], victim: str,
    when: float,
) -> None:  # fmt: skip
    kernel = kernel_factory(NBTRAIN_RUNS=os.environ["NBTRAIN_RUNS"])
    notebook = Notebook(kernel)
    notebook(MAKE)
    pids: list[int] = []
    cell = kernel.start(CELL.format(options="--detach"))
    time.sleep(when * LASTS)
    for run in every_run():
        if (found := keeper(run)) is not None:
            with suppress(psutil.NoSuchProcess):
                pids += [found.pid, *(child.pid for child in found.children(recursive=True))]
    strike = VICTIMS[victim]
    if strike is None:
        ENDS[victim](kernel)
    else:
        kernel.wait_for(lambda: bool(every_run()) or cell.done)
        for run in every_run():
            strike(run)
        kernel.wait_for(lambda: cell.done)
    deadline = time.monotonic() + 60
    while any(run.state == GOES_ON for run in every_run()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert gone_within(10, lambda: [pid for pid in pids if psutil.pid_exists(pid)]) == []
    if not every_run():
        assert strike is None or cell.error is not None
        return
    (run,) = every_run()
    if run.end is None:
        assert "is lost" in lost(run)
        assert victim == "the keeper"
        return
    if strike is None or victim == "all, by a word":
        assert run.state == "done" or (strike and run.state == "stopped")
    said = run.end["lines"]
    assert run.state == "done" or said, run.end
    losses, sums = undisturbed
    values = DetachedRun(run).values
    if "model" not in values:  # nothing was kept, or it had not begun
        assert run.state in ("failed", "stopped", "killed")
        return
    steps = len(values["losses"])
    assert (values["losses"], values["sums"]) == (losses[:steps], sums[:steps])
    assert sum(p.double().sum().item() for p in values["model"].parameters()) == sums[steps - 1]
    assert steps == STEPS or run.state != "done"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The runs' folder with one that has left 160 MB, and how long it takes to bring that home."""
    place = tmp_path_factory.mktemp("done") / "runs"
    with running_kernel(NBTRAIN_RUNS=str(place)) as kernel:
        notebook = Notebook(kernel)
        notebook(MAKE + "; more = [torch.zeros(1_000_000) for _ in range(40)]")
        notebook(CELL.format(options="--detach") + "for one in more: one += rank + len(losses)\n")
        (run,) = every_run(place)
        kernel.wait_for(lambda: run.end is not None)
        began = time.monotonic()
        notebook("%distributed attach")
        lasts = time.monotonic() - began
    return place, lasts


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("moment", range(10))
def test_a_homecoming_that_is_cut_short_is_done_again(
    undisturbed: tuple[list[float], list[float]], done: tuple[Path, float], kernel_factory: Callable[..., Kernel],
    moment: int,
) -> None:  # fmt: skip
    place, lasts = done
    (place / "0001" / "taken.json").unlink(missing_ok=True)
    when = random.Random(SEED + moment).random() * lasts
    kernel = kernel_factory(NBTRAIN_RUNS=str(place))
    Notebook(kernel)(MAKE)
    kernel.start("%distributed attach")
    time.sleep(when)
    kernel.kill()
    second = Notebook(kernel_factory(NBTRAIN_RUNS=str(place)))
    second(MAKE)
    said = second("%distributed attach").stdout
    assert "yours kept" not in said
    assert "is done, 36 steps" in said
    tell = "import json; print(json.dumps([losses, sums, [t.sum().item() for t in more]]))"
    assert json.loads(second(tell).stdout) == [*undisturbed, [36e6] * 40]


def tail(run: RunFolder) -> str:
    with suppress(OSError):  # it turns to the next file
        return (run.path / "output.2").read_text(errors="replace")[-200_000:]
    return ""


@pytest.mark.thorough
def test_600_megabytes_of_output_take_16_and_no_memory(runs: None, kernel_factory: Callable[..., Kernel]) -> None:
    notebook = Notebook(kernel_factory(NBTRAIN_RUNS=os.environ["NBTRAIN_RUNS"]))
    notebook("%%distributed -d 2 --monitor off --detach\nfor number in range(12_000): print(number, 'x' * 50_000)\n"
             "print('all')\nwhile True: pass")  # fmt: skip
    (run,) = every_run()
    found, most = keeper(run), 0
    assert found is not None
    before = found.memory_full_info().uss
    deadline = time.monotonic() + 150
    while "all\\n" not in tail(run):
        assert time.monotonic() < deadline
        most = max(most, found.memory_full_info().uss)
        assert run.size < 17 << 20
        time.sleep(0.2)
    assert most - before < 100 << 20
    began = time.monotonic()
    notebook("%distributed runs stop")
    while run.end is None:
        assert time.monotonic() < began + 10
        time.sleep(0.05)
    shown = notebook("%distributed attach").stdout
    assert "pieces of output between" in shown
    assert len(shown) < 300_000


@pytest.mark.thorough
@pytest.mark.parametrize("moment", range(10 if os.environ.get("FAULTS") == "all" else 1))
def test_it_outlives_its_server(undisturbed: tuple[list[float], list[float]], runs: None, moment: int) -> None:
    when = random.Random(SEED + moment).random() * LASTS
    with private_home() as home, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address, environ = f"http://127.0.0.1:{probe.getsockname()[1]}", private_environment(home)
        probe.close()
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", "--allow-root", f"--port={address.rpartition(':')[2]}",
             "--ServerApp.disable_check_xsrf=True", "--IdentityProvider.token=", f"--ServerApp.root_dir={home}"],
            env={**environ, "NBTRAIN_RUNS": os.environ["NBTRAIN_RUNS"]}, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            client = BlockingKernelClient(connection_file=kernel_of(address, environ))
            client.load_connection_file()
            client.start_channels()
            for code in ("%load_ext nbtrain", START, MAKE):
                client.execute(code, reply=True, timeout=60)
            client.execute(CELL.format(options="--detach"))
            time.sleep(when)
            server.terminate()
            server.wait(30)
            client.stop_channels()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        deadline = time.monotonic() + 60
        while any(run.state == GOES_ON for run in every_run()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for run in every_run():
            assert run.state == "done"
            values = DetachedRun(run).values
            assert (values["losses"], values["sums"]) == undisturbed


def kernel_of(server: str, environ: dict[str, str]) -> str:
    """The connection file of a new kernel of this server's."""
    for _ in range(300):
        with suppress(OSError):
            made = urllib.request.urlopen(urllib.request.Request(f"{server}/api/kernels", b"{}", method="POST"))
            name = json.load(made)["id"]
            break
        time.sleep(0.1)
    return str(next(Path(environ["HOME"]).rglob(f"kernel-{name}.json")))
