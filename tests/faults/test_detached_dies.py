"""A detached run, and its kernel, its keeper, the keeper's nursery or a rank ended at any moment. What is there of it
is what an undisturbed run has, to the last bit, or a sentence says why there is nothing; before it was taken over
nothing is left.

FAULTS=all plays forty moments, SEED=n others than the usual ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nbtrain.annexes.detached.detached_run import DetachedRun, lost
from nbtrain.annexes.detached.run_folders import GOES_ON, RunFolder, every_run
from tests.support.hygiene import gone_within
from tests.support.kernels import Kernel, running_kernel
from tests.support.notebook import TRAIN, Notebook

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
        return psutil.Process(int((run.path / "lock").read_text())) if run.is_kept else None
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


VICTIMS: dict[str, Callable[[RunFolder], None] | None] = {
    "the kernel": None,
    "a rank": lambda run: end(run, 2),
    "the keeper": lambda run: end(run, 0),
    "all, by a word": ask_all,
    "its nursery": lambda run: end(run, 1),
}


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
        os.kill(kernel.pid, signal.SIGKILL)
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
    if victim in ("the kernel", "all, by a word"):
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
