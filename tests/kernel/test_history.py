"""The history of runs in a real kernel, with a writer of TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels import Kernel

SETUP = """%load_ext nbtrain
import torch, nbtrain
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=8)
model = nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""

LOOP = """
for x, y in loader:
    loss = (model(x) - y).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    log(loss=loss)
"""


@pytest.mark.kernel
def test_in_a_kernel(kernel_factory: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    kernel = kernel_factory(NBTRAIN_HISTORY=str(tmp_path / "history"))

    def run(cell: str) -> Any:
        result = kernel.run(cell)
        assert result.error is None, result.text
        return result

    run(SETUP)
    run(f"writer = SummaryWriter({str(tmp_path / 'board')!r})")
    run("%%distributed -d 2 --log-to writer --monitor off" + LOOP)
    run("%%distributed -d 2 --monitor off\n1 + 1")
    assert kernel.run("%%distributed -d 2 --monitor off" + LOOP + "if rank == 1: 1 / 0").error is not None
    run("%%distributed --engine inprocess --monitor off" + LOOP)
    shown = run("%distributed history").displays[-1]
    assert "<span>ddp</span>" in shown["text/html"]
    lines = shown["text/plain"].splitlines()
    assert [line.split("  ")[0] for line in lines[2:]][:1] == ["1"]
    assert "failed: ZeroDivisionError" in shown["text/plain"]
    assert run("len(nbtrain.history())").value == "3"
    assert run("h = nbtrain.history()[1]; h.ended, h.metrics['rank'].value_counts().to_dict()").value == (
        "('done', {0: 4, 1: 4})"
    )
    assert run("nbtrain.history()[-1].figures['steps']").value == "8"

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert sorted(board.Tags()["scalars"]) == ["loss", "loss/rank1"]
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4]
    run("writer.close()")
    values = json.loads(run("import json; print(json.dumps(h.metrics['loss'].tolist()))").stdout)
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(values[:4])


PACED = LOOP.replace("loss.backward()", "time.sleep(0.1); loss.backward()").replace("in loader", "in small")


@pytest.mark.thorough
@pytest.mark.kernel
@pytest.mark.parametrize("way", ["fsdp -d 2", "pipeline -d 2", "ddp2 -d 4 --nodes 2"])
def test_a_sample_that_several_ranks_see_counts_once(
    kernel_factory: Callable[..., Kernel], tmp_path: Path, way: str
) -> None:
    kernel = kernel_factory(NBTRAIN_HISTORY=str(tmp_path / "history"))
    kernel.run(SETUP)
    kernel.run("import time; small = DataLoader(loader.dataset, 4); model = nn.Sequential(*[nn.Linear(4, 4) for _ in "
               "range(4)]); optimizer = torch.optim.SGD(model.parameters(), 0.1)")  # fmt: skip
    shown = kernel.run(f"%%distributed -s {way} --monitor off" + PACED)
    assert shown.error is None, shown.text
    assert kernel.run("nbtrain.history()[-1].figures['samples']").value == "64"
