"""A detached run is stopped, and gone on from under the same strategy, or another one on other ranks: what it trains is
what an undisturbed run has; to the last bit on the same ranks and strategy."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from nbtrain.annexes.detached.run_folders import RunFolder, every_run
from tests.support.kernels import Kernel
from tests.support.notebook import TRAIN, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.limit(240)]

MAKE = f"import time; torch.manual_seed(3); {TRAIN}; schedule = torch.optim.lr_scheduler.StepLR(opt, 5); losses = []"
CELL = """%%distributed --monitor off {options}
torch.manual_seed(5)
for epoch in range(6):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward(); opt.step(); opt.zero_grad(); schedule.step()
        losses.append(loss.item()); time.sleep({pause})
"""
TELL = "print(repr((losses, len(losses), [p.tolist() for p in model.parameters()], opt.param_groups[0]['lr'])))"
SAME = ["ddp", "zero1", "sharded", "fsdp", "pipeline", "deepspeed --stage 2", "deepspeed --stage 3"]
ACROSS = [
    ("ddp -d 2", "fsdp -d 4"), ("fsdp -d 2", "zero1 -d 2"), ("sharded -d 3", "ddp -d 2"), ("zero1 -d 2", "single -d 1"),
    ("deepspeed --stage 3 -d 2", "ddp -d 2"), ("ddp -d 2", "deepspeed --stage 2 -d 2"), ("pipeline -d 2", "ddp -d 2"),
]  # fmt: skip
ROWS = [*((f"{name} -d 2", f"{name} -d 2") for name in SAME), *ACROSS]


@pytest.fixture
def notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_factory: Callable[..., Kernel]
) -> Iterator[Notebook]:
    monkeypatch.setenv("NBTRAIN_RUNS", str(tmp_path / "runs"))
    yield Notebook(kernel_factory(NBTRAIN_RUNS=str(tmp_path / "runs")))
    for run in every_run():
        if run.is_kept:
            keeper(run).kill()


def keeper(run: RunFolder) -> psutil.Process:
    return psutil.Process(int((run.path / "lock").read_text().split()[0]))


def numbers(told: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d[\d.e-]*", told)]


@pytest.mark.sample("fsdp -d 2")
@pytest.mark.parametrize(("before", "after"), ROWS, ids=[b if b == a else f"{b} to {a}" for b, a in ROWS])
def test_it_goes_on_as_if_nothing_had_been(notebook: Notebook, before: str, after: str) -> None:
    if "deepspeed" in before + after and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    notebook(MAKE)
    notebook(CELL.format(options=f"-s {before}", pause=0), 120)
    undisturbed = notebook(TELL).stdout
    notebook("%distributed stop")
    notebook(MAKE)
    notebook(CELL.format(options=f"-s {before} --detach", pause=0.2), 120)
    (run,) = every_run()
    deadline = time.monotonic() + 60
    while not re.search(r"step ([2-9]|1\d)", notebook("%distributed runs").stdout):
        assert time.monotonic() < deadline
    keeper(run).terminate()
    while run.end is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    said = notebook(f"%distributed resume -s {after}", 120).text
    assert "goes on after step" in said, said
    notebook("%distributed attach", 120)
    told = notebook(TELL).stdout
    if before == after:
        assert told == undisturbed
    else:
        told, undisturbed = (text.partition("], ")[2] for text in (told, undisturbed))  # losses are one rank's
        assert numbers(told) == pytest.approx(numbers(undisturbed), rel=1e-4, abs=1e-5)
