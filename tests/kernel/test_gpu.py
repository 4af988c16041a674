"""What is otherwise on a GPU: `make gpu`. One card is enough: ranks that share it use NCCL as on several.

The tables of lines and of strategies are played on a card, too (`ON_CARDS=1`, tests/support/cards.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from nbtrain.machine import gpus
from tests.support.kernels import Kernel
from tests.support.machines import notebook_with_machines
from tests.support.notebook import Notebook

pytestmark = [pytest.mark.gpu, pytest.mark.kernel, pytest.mark.limit(240)]
ONE = "%%distributed --devices 1 --accelerator cuda"
TWO = "%%distributed --devices 2 --accelerator cuda --oversubscribe --split-batches"

SETUP = """
import os, time, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
X, Y = torch.randn(256, 16), torch.randint(0, 4, (256,))
def make(drop=0.0, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(drop), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), 1e-2, **options)
loader = DataLoader(TensorDataset(X, Y), batch_size=32)
def numbers(model, opt):
    states = [value for p in model.parameters() for _, value in sorted(opt.state[p].items())]
    return [t.detach().cpu().double() for t in [*model.parameters(), *states]]
def steps_alone(count):
    model, opt = make()
    for i in range(count):
        x, y = X[i * 32 % 256:][:32], Y[i * 32 % 256:][:32]
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
    return numbers(model, opt)
def apart(model, opt, count):
    return max(float((a - b).abs().max()) for a, b in zip(numbers(model, opt), steps_alone(count), strict=True))
model, opt = make()
losses = []
"""
LOOP = """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); opt.step(); opt.zero_grad()
    losses.append(loss.item())
"""
HARM = """
for i, (x, y) in enumerate(loader):
    if i == 3 and rank == world_size - 1: {harm}
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
"""
"""No line of it waits for the GPU: code runs ahead of it."""

AHEAD = """
for x, y in loader:
    torch.cuda._sleep(10**9)  # half a second, which the code does not wait for
    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
"""

STRATEGIES = ["ddp", "zero1", "fsdp", "pipeline --microbatches 2", "ddp2", "dp"]
STRATEGIES += [f"deepspeed --stage {stage}" for stage in (1, 2, 3)] if find_spec("deepspeed") else []
STRATEGIES += ["sharded"] if find_spec("fairscale") else []


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    yield Notebook(shared_kernel, SETUP)
    shared_kernel.run("%distributed stop")


def near(notebook: Notebook, steps: int) -> None:
    """The notebook has what one process gets with so many steps on a CPU, the optimizer's states included."""
    assert float(notebook(f"apart(model, opt, {steps})").value or 1) < 1e-5


# --- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "none"])
def test_one_rank_on_a_card(notebook: Notebook, strategy: str) -> None:
    """The model comes home to the CPU, and the notebook itself never wakes CUDA."""
    for cell in (1, 2):
        notebook(f"{ONE} -s {strategy}{LOOP}", 110)
        near(notebook, 8 * cell)
    assert notebook("next(model.parameters()).device.type, torch.cuda.is_initialized()").value == "('cpu', False)"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_share_a_card(notebook: Notebook, strategy: str) -> None:
    """Twice: the second cell begins with states that the first has made. And with new ranks, which are sent them."""
    for cell in (1, 2):
        notebook(f"{TWO} -s {strategy}{LOOP}", 110)
        near(notebook, 8 * cell)
    if strategy != "dp":
        assert "nccl" in notebook("%distributed status").text
    notebook("%distributed stop")
    notebook(f"{TWO} -s {strategy}{LOOP}", 110)
    near(notebook, 24)


@pytest.mark.skipif(len(gpus.gpus()) < 2, reason="there is one card")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_on_each_card(notebook: Notebook, strategy: str) -> None:
    for cell in (1, 2):
        notebook(f"%%distributed --devices 2 --split-batches -s {strategy}{LOOP}", 110)
        near(notebook, 8 * cell)


@pytest.mark.parametrize("options", ["fused=True", "capturable=True", "foreach=False", "amsgrad=True"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *(["deepspeed --stage 2"] if find_spec("deepspeed") else [])])
def test_states_of_other_kernels(notebook: Notebook, strategy: str, options: str) -> None:
    alone = options.replace("capturable=True", "")  # which a CPU cannot
    notebook(f"model, opt = make({options}); m, o = make({alone})")
    for _ in range(2):
        notebook(f"{TWO} -s {strategy}{LOOP}", 110)
    notebook("""
for _ in range(2):
    for x, y in loader:
        F.cross_entropy(m(x), y).backward(); o.step(); o.zero_grad()
far = max(float((a - b).abs().max()) for a, b in zip(numbers(model, opt), numbers(m, o), strict=True))
assert far < 1e-5, far
""")


def test_precisions_on_a_card(notebook: Notebook) -> None:
    for precision in ("bf16-mixed", "16-mixed"):
        for strategy in ("ddp", "fsdp"):
            notebook("model, opt = make(); losses = []")
            notebook(f"{TWO} -s {strategy} --precision {precision}{LOOP}", 110)
            assert float(notebook("apart(model, opt, 8)").value or 1) < 0.05
            assert notebook("next(model.parameters()).dtype").value == "torch.float32"


def test_dropout_is_what_the_notebook_s_own_card_would_draw(notebook: Notebook) -> None:
    notebook("model, opt = make(0.5); torch.manual_seed(7); losses = []")
    notebook(ONE + LOOP, 110)
    notebook("theirs, (model, opt), losses = losses, make(0.5), []; torch.manual_seed(7)")
    notebook("""
model.cuda(); opt = torch.optim.AdamW(model.parameters(), 1e-2)
for x, y in loader:
    loss = F.cross_entropy(model(x.cuda()), y.cuda())
    loss.backward(); opt.step(); opt.zero_grad(); losses.append(loss.item())
assert losses == theirs, (losses, theirs)
""")


def test_a_model_that_is_on_the_card_stays_there(kernel: Kernel) -> None:
    notebook = Notebook(kernel, SETUP)
    notebook("model.cuda(); opt = torch.optim.AdamW(model.parameters(), 1e-2); ids = [*map(id, model.parameters())]")
    for line, steps in ((ONE, 8), (f"{TWO} -s ddp", 16), (f"{TWO} -s fsdp", 24)):
        notebook(line + LOOP, 110)
        near(notebook, steps)
        assert notebook("next(model.parameters()).device, ids == [*map(id, model.parameters())]").value == (
            "(device(type='cuda', index=0), True)"
        )


def test_a_checkpoint_of_a_card(notebook: Notebook) -> None:
    notebook(f"{TWO} -s fsdp{LOOP}\nsave('kept')", 110)
    notebook("model, opt = make()")
    notebook(f"{TWO} -s ddp\nload('kept'){LOOP}", 110)
    near(notebook, 16)


def test_verify(notebook: Notebook) -> None:
    for strategy in ("ddp", "fsdp"):
        assert "✓ equal" in notebook(f"{TWO} -s {strategy} --verify{LOOP}", 110).text


def test_two_machines_with_one_card() -> None:
    with notebook_with_machines() as (notebook, _):
        notebook(SETUP)
        line = "%%distributed --engine elastic --nodes 2 --devices 1 --accelerator cuda --split-batches"
        for cell, strategy in enumerate(("ddp", "fsdp"), start=1):
            notebook(f"{line} -s {strategy}{LOOP}", 110)
            near(notebook, 8 * cell)


def test_a_run_goes_on_without_a_rank_that_died(tmp_path: Path) -> None:
    """From the last whole step, though the code runs ahead of the card."""
    flag = str(tmp_path / "died")
    with notebook_with_machines() as (notebook, machines):
        notebook(SETUP)
        notebook.kernel.wait_for(lambda: machines.joined() == 2)
        cell = f"""%%distributed --engine elastic --nodes 1:2 --devices 1 --accelerator cuda --split-batches
for epoch in resumable(range(3)):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()
        if epoch == 1 and rank == 1 and not os.path.exists({flag!r}):
            open({flag!r}, "w").close(); os.kill(os.getpid(), 9)
"""
        assert re.search(r"goes on .*after step \d+", notebook(cell, 110).text)
        near(notebook, 24)


# --- what goes wrong -------------------------------------------------------------------------------


def test_a_card_that_is_lost(notebook: Notebook) -> None:
    """An index out of bounds there: CUDA lets the process do nothing more."""
    bad = "torch.zeros(4, device=device)[torch.tensor([7], device=device)].sum().item()"
    for cell in (bad, f"try: {bad}\nexcept Exception: pass"):
        assert "CUDA lets a process compute no more" in notebook.fails(f"{ONE}\n{cell}", 110).traceback
        notebook(ONE + LOOP, 110)
    near(notebook, 16)
    error = notebook.fails(TWO + HARM.format(harm="y = y + 100"), 110).traceback
    assert "rank 1 can use the GPU no more, and was replaced" in error
    assert "rank 0 did not end" not in error
    notebook("%distributed recover" if "%distributed recover" in error else "model, opt = make()")
    notebook(TWO + LOOP, 110)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_one_of_two_raises(notebook: Notebook, strategy: str) -> None:
    """Its code has asked for three steps, the other's for all: what is held are the three."""
    notebook(f"{TWO} -s {strategy}\npass", 110)
    error = notebook.fails(f"{TWO} -s {strategy}" + HARM.format(harm="raise ValueError('boom')"), 110).traceback
    assert "raised on rank 1" in error
    assert "did not end" not in error
    held = re.search(r"Step (\d) was kept", error)
    if held is not None:
        notebook("%distributed recover")
        near(notebook, int(held[1]))
    else:
        notebook("model, opt = make()")
        notebook(f"{TWO} -s {strategy}{LOOP}", 110)
        near(notebook, 8)
    assert held is not None or strategy == "fsdp"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_of_two_dies(notebook: Notebook, strategy: str) -> None:
    """Steps that waited for it on the other's card are never taken for done."""
    notebook(f"{TWO} -s {strategy}\npass", 110)
    error = notebook.fails(f"{TWO} -s {strategy}" + HARM.format(harm="os.kill(os.getpid(), 9)"), 110).traceback
    assert "was ended by SIGKILL" in error
    if held := re.search(r"Step (\d) was kept", error):
        notebook("%distributed recover")
        near(notebook, int(held[1]))
    else:
        notebook(f"{TWO} -s {strategy}{LOOP}", 110)
        near(notebook, 8)


def test_stop(notebook: Notebook) -> None:
    for line, loop in ((ONE, LOOP), (f"{TWO} -s ddp", LOOP), (f"{TWO} -s fsdp", LOOP), (f"{TWO} -s ddp", AHEAD)):
        notebook("model, opt = make()")
        notebook(f"{line}\npass", 110)
        endless = notebook.kernel.start(f"{line}\nwhile True:\n" + re.sub("^", "    ", loop, flags=re.MULTILINE))
        time.sleep(2)
        notebook.kernel.interrupt()
        notebook.kernel.wait(endless, 30)
        assert endless.error is not None
        stopped = re.search(r"stopped after step ([\d,]+)", endless.error.evalue)
        assert stopped is not None, endless.error.evalue
        near(notebook, int(stopped[1].replace(",", "")))


def test_no_memory_is_left(notebook: Notebook) -> None:
    error = notebook.fails(f"{ONE}\ntorch.empty(2**50, dtype=torch.uint8, device=device)", 110).traceback
    assert "OutOfMemoryError" in error
    assert "Memory: rank 0 had" in error
    notebook(ONE + LOOP, 110)
    near(notebook, 8)


# --- what is said ----------------------------------------------------------------------------------


def test_memory_of_the_card_is_read_without_waking_it(notebook: Notebook) -> None:
    (card, *_) = gpus.gpus()
    assert 0 < card.used < card.total
    assert card.name in notebook("%distributed doctor").text


def test_more_ranks_than_cards_names_the_way_out(notebook: Notebook) -> None:
    assert "--oversubscribe" in notebook.refused("%%distributed --devices 99\npass")
