"""`--nodes MIN:MAX`: a run goes on when a machine or a rank is lost, takes in one that joins, and trains what it would
have trained undisturbed."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.kernels import Result
from tests.support.machines import Machines, notebook_with_machines
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.ranks]

FRESH = """
import time
torch.manual_seed(0)
X = torch.randn(240, 4); Y = (X.sum(1) > 0).long()
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.Adam(model.parameters(), 0.01)
sched = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
loader = DataLoader(TensorDataset(X, Y), 6, shuffle=True)
"""
BODY = """
import time
epochs, n, lost = 8, 0, []
print('begun', world_size)
for epoch in resumable(range(epochs)):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad(); loss.backward(); opt.step()
        n += 1; time.sleep(PAUSE)
        if n % 10 == 0 and rank == 0: print('step', n)
    sched.step()
print('over')
sched.step(); sched.step()
"""
WEIGHTS = (
    "torch.cat([one.detach().flatten().double() for one in model.parameters()]).tolist() + [sched.get_last_lr()[0]]"
)
LINE = "%%distributed --engine elastic --nodes 1:3 --devices 1 --monitor off "
Two = tuple[Notebook, Machines]


@pytest.fixture
def two() -> Iterator[Two]:
    with notebook_with_machines() as (notebook, machines):
        notebook(FRESH)
        notebook.kernel.wait_for(lambda: machines.joined() == 2)
        yield notebook, machines


def weights(notebook: Notebook) -> list[float]:
    found = notebook(WEIGHTS).value
    assert found is not None
    return [float(one) for one in found.strip("[]").replace("\n", "").split(",")]


def undisturbed(notebook: Notebook, strategy: str) -> list[float]:
    notebook(f"%%distributed --devices 2 --monitor off -s {strategy}\n{BODY.replace('PAUSE', '0')}")
    found = weights(notebook)
    notebook("%distributed stop")
    notebook(FRESH)
    return found


def begin(notebook: Notebook, strategy: str, options: str = "") -> Result:
    return notebook.kernel.start(f"{LINE}-s {strategy} {options}\n{BODY.replace('PAUSE', '0.04')}")


def until(notebook: Notebook, cell: Result, said: str) -> None:
    notebook.kernel.wait_for(lambda: said in cell.stdout or cell.done, 60)
    assert said in cell.stdout, cell.text


@pytest.mark.thorough
@pytest.mark.limit(200)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "ddp --accumulate 2"])
def test_machines_come_and_go_and_the_weights_are_the_same(two: Two, strategy: str) -> None:
    """Two machines, then three, then one."""
    notebook, machines = two
    expected = undisturbed(notebook, strategy)
    cell = begin(notebook, strategy)
    until(notebook, cell, "step 10")
    machines.add()
    until(notebook, cell, "a machine has joined; the cell goes on after step")
    assert "with 3 ranks on 3 machines; a step takes 2 batches, as before" in cell.stdout
    reached = int(re.findall(r"step (\d+)\n", cell.stdout)[-1])
    until(notebook, cell, f"step {reached + 20}")
    for node in machines.nodes[1:]:
        node.kill()
    until(notebook, cell, "is lost (its node has ended); the cell goes on")
    notebook.kernel.wait(cell, 120)
    assert cell.error is None, cell.text
    assert "with 1 rank on 1 machine; a step takes 2 batches, as before" in cell.stdout
    assert cell.stdout.count("begun") == 1 or strategy == "zero1"
    assert weights(notebook) == pytest.approx(expected, abs=2e-6)


@pytest.mark.thorough
@pytest.mark.limit(200)
@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed --stage 2"])
def test_models_in_pieces_go_on_from_the_last_checkpoint(two: Two, strategy: str) -> None:
    notebook, machines = two
    expected = undisturbed(notebook, strategy)
    cell = begin(notebook, strategy, "--save-every 5")
    until(notebook, cell, "step 30")
    machines.nodes[1].kill()
    if strategy != "fsdp":
        machines.add()  # DeepSpeed takes two ranks or more, and waits for them
    until(notebook, cell, "the cell goes on from the last checkpoint")
    notebook.kernel.wait(cell, 120)
    assert cell.error is None, cell.text
    assert weights(notebook) == pytest.approx(expected, abs=2e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["pipeline", "ddp2"])
def test_a_step_takes_the_batches_that_the_strategy_shares_out(two: Two, strategy: str) -> None:
    notebook, _ = two
    deeper = FRESH.replace("nn.Linear(8, 2))", "nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))")
    body = BODY.replace("PAUSE", "0").replace("8, 0, []", "1, 0, []")
    found = []
    for line in ("%%distributed --nodes 2 --devices 4 --monitor off", LINE.replace("--devices 1", "--devices 2")):
        notebook(deeper)
        notebook(f"{line} -s {strategy}\n{body}", 120)
        found.append((notebook("n").value, weights(notebook)))
        notebook("%distributed stop")
    assert found[0] == found[1]


@pytest.mark.limit(200)
def test_a_rank_that_is_killed_costs_its_step_only(two: Two) -> None:
    notebook, _ = two
    expected = undisturbed(notebook, "ddp")
    notebook("died = []")
    kill = "if n == 30 and rank == 1 and not died: import os; os.kill(os.getpid(), 9)"
    body = BODY.replace("PAUSE", "0").replace("    sched.step()", f"        {kill}\n    sched.step()")
    # What kills it is not home when it is dead, so that it must know by a file that it has done so.
    body = body.replace("not died", "not __import__('os').path.exists('died')").replace(
        "import os; os.kill", "import os; open('died', 'w').close(); os.kill"
    )
    run = notebook(f"{LINE}-s ddp\n{body}", 120)
    assert "was ended by SIGKILL; the cell goes on after step 30" in run.stdout
    assert weights(notebook) == pytest.approx(expected, abs=2e-6)
    assert notebook("n").value == "160"
    for last in (1, 0):  # the others have come to the cell's end
        notebook(FRESH)
        dies = f"\nif rank == {last}: import os; time.sleep(2); os.kill(os.getpid(), 9)"
        run = notebook(f"{LINE}-s ddp\n{BODY.replace('PAUSE', '0')}{dies}", 120)
        assert f"rank {last}" in run.stdout
        assert "the cell had ended, and all it did is in the notebook" in run.stdout
        assert weights(notebook) == pytest.approx(expected, abs=2e-6)
        assert notebook("n").value == "160"


@pytest.mark.thorough
def test_a_loop_that_does_not_know_its_place_is_refused(two: Two) -> None:
    notebook, _ = two
    assert "for epoch in resumable(range(10))" in notebook.refused(f"{LINE}\nfor x, y in loader:\n    pass")
    assert "--engine elastic" in notebook.refused("%%distributed --nodes 1:2 --devices 2\npass")
    assert "two numbers, as in --nodes 1:3" in notebook.refused("%%distributed --nodes 3:1 --engine elastic\npass")
    notebook("def fit():\n    for i in resumable(range(3)):\n        pass")
    assert "in the cell itself" in notebook.refused(f"{LINE}\nfit()")
    notebook(f"{LINE}\nfor i in resumable(range(3)):\n    pass")
