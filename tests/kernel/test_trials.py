"""A cell that is only tried: what is measured, and that nothing else comes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernels import Kernel, Result
from tests.support.notebook import Notebook

LOOP = """
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
"""
SETUP = """
import os, signal, time
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
width = 64
model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(640, 8), torch.randint(4, (640,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
losses = []
def state():
    return [p.sum().item() for p in model.parameters()], len(losses), len(optimizer.state), torch.rand(1).item()
drawn = torch.get_rng_state()
"""
CALLED = re.compile(r"use: %%distributed --strategy \w+ --devices \d|too close to call: \w+(, \w+)* and \w+")


@pytest.fixture
def nb(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook(SETUP)
    yield notebook
    notebook("%distributed stop")


def rows(result: Result) -> dict[str, list[str]]:
    """Of the table that is shown last: by name, the cells of a line."""
    text = result.text
    lines = text[text.rindex("strategy  ") :].split("\n\n")[0].splitlines()[2:]
    found = [re.split(r"\s{2,}", line.replace("★", "").strip()) for line in lines if line[:1].strip()]
    return {cells[0].strip(): cells[1:] for cells in found if cells[0]}


@pytest.mark.kernel
def test_strategies_are_compared_and_the_notebook_stays_as_it_was(nb: Notebook, tmp_path: Path) -> None:
    nb("torch.set_rng_state(drawn); before = state()")
    saves = f"torch.save(model.state_dict(), {str(tmp_path / 'a.pt')!r}); save({str(tmp_path / 'b')!r})"
    shown = nb(f"%%distributed -d 2 --compare ddp,zero1,single --steps 3{LOOP}    {saves}\nprint('said')")
    found = rows(shown)
    assert list(found) == ["ddp", "zero1", "single"]
    assert all(re.search(r"\d", " ".join(cells)) for cells in found.values())
    assert re.search(r"^3 ways · [3-8] × 3 steps of each", shown.text, re.M)
    assert all("±" in " ".join(cells) for cells in found.values())
    assert CALLED.search(shown.text)
    assert "said" not in shown.stdout, "what the loop prints is nobody's business here"
    assert list(tmp_path.iterdir()) == [], "nor is what it saves"
    assert nb("torch.set_rng_state(drawn); print(state() == before, torch.equal(drawn, drawn))").stdout == "True True\n"
    nb("torch.set_rng_state(drawn)\nmine = [p.detach().clone() for p in model.parameters()]; torch.manual_seed(1)")
    nb(f"%%distributed -d 2{LOOP}")
    nb("trained = state()[0]; n = len(losses)\nfor p, q in zip(model.parameters(), mine): p.data.copy_(q)")
    nb("optimizer = torch.optim.AdamW(model.parameters()); losses = []; torch.manual_seed(1)")
    nb(f"%%distributed -d 2 --compare ddp,fsdp --steps 3{LOOP}")
    nb(f"%%distributed -d 2{LOOP}")
    assert nb("print(state()[0] == trained, len(losses) == n)").stdout == "True True\n", "ranks know nothing of it"


@pytest.mark.thorough
@pytest.mark.kernel
def test_what_fails_is_a_row(nb: Notebook) -> None:
    nb("import nbtrain\nclass Mine(nbtrain.Strategy):\n    def set_up(self, *_):\n        raise ValueError('not so')")
    found = nb(f"%%distributed -d 2 --compare Mine,ddp --steps 2{LOOP}")
    assert "ValueError: not so" in " ".join(rows(found)["Mine"])
    assert "use: %%distributed --strategy ddp --devices 2" in found.text
    found = nb(f"%%distributed -d 2 --compare ddp,fsdp --steps 2\nif rank: os.kill(os.getpid(), signal.SIGKILL){LOOP}")
    assert found.text.count("SIGKILL") == 2
    assert "out of memory" not in found.text
    assert "none of them worked" in found.text
    found = nb(f"%%distributed -d 2 --compare ddp --memory 200MB\nlarge = torch.ones(100_000_000) * 2{LOOP}")
    assert rows(found)["ddp"] == ["out of memory"]
    assert "KeyError" not in nb(f"%%distributed -d 2{LOOP}").text, "and the next cell finds sound ranks"


@pytest.mark.kernel
@pytest.mark.parametrize("option", ["--compare ddp,zero1", "--find-batch"])
def test_a_cell_without_a_step_is_one_sentence_and_no_table(nb: Notebook, option: str) -> None:
    said = nb.refused(f"%%distributed -d 2 {option}\nfor x, y in loader: model(x)")
    assert said == "UsageError: nothing to measure: the cell takes no optimizer step"


@pytest.mark.kernel
def test_the_largest_batch_is_found_between_what_fits_and_what_does_not(nb: Notebook) -> None:
    # 64 MB for each thousand samples: what a rank may have decides, not what torch has besides.
    greedy = LOOP.replace("    loss =", "    held = torch.ones(len(x), 16_000)\n    loss =")
    found = nb(f"%%distributed -d 2 --compare ddp,zero1 --find-batch --steps 1 --memory 250MB{greedy}", timeout=110)
    for row in rows(found).values():
        size = int(row[0].split()[0].replace(",", ""))
        assert 1000 < size < 4500, found.text
    nb("x, y = next(iter(loader))")
    loop = "for i in range(9):\n    F.cross_entropy(model(x), y).backward(); optimizer.step()"
    found = nb(f"%%distributed -d 2 --find-batch\n{loop}")
    assert "write --find-model NAME=8,16,32 with it" in " ".join(found.text.split())


@pytest.mark.thorough
@pytest.mark.kernel
def test_the_largest_model_is_the_last_of_its_list_that_fits(nb: Notebook) -> None:
    makes = "model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, width), nn.Linear(width, 4))\n"
    makes += "optimizer = torch.optim.AdamW(model.parameters())\n"
    line = "%%distributed -d 2 --steps 1 --memory 500MB --find-model"
    found = nb(f"{line} width=64,512,9000\n{makes}{LOOP}")
    assert rows(found)["ddp"][0] == "512"
    assert nb("print(width, len(model))").stdout == "64 3\n"
    assert "does not read width" in nb.refused(f"{line} width=1,2{LOOP}")
    assert "has no 'depth'" in nb.refused(f"{line} depth=1,2{LOOP}")


@pytest.mark.thorough
@pytest.mark.kernel
def test_growth_is_measured_on_a_few_ranks_and_told_of_many(nb: Notebook) -> None:
    found = nb(f"%%distributed --grow 1,2 --steps 3 --bandwidth 10GB/s{LOOP}").text
    assert re.search(r"^512 +64 ", found, re.MULTILINE), found
    assert "Fitted on 1, 2 ranks" in found
    assert "10 GB/s between nodes" in found or "the stated 10 GB/s" in found
    assert "★" not in found, "nobody asked for the best"
    failing = nb.kernel.run("%%distributed --grow 1,2 --steps 3\n1 / 0").text
    assert "fewer than that have worked" in failing


@pytest.mark.thorough
@pytest.mark.kernel
def test_stop_ends_it_with_what_was_measured(nb: Notebook) -> None:
    slow = LOOP.replace("    losses", "    time.sleep(0.05)\n    losses")
    running = nb.kernel.start(f"%%distributed -d 2 --compare ddp,zero1,sharded --steps 20{slow}")
    nb.kernel.wait_for(lambda: "samples/s" in running.text and re.search(r"ddp.*\d [kM]B", running.text))
    nb.kernel.interrupt()
    nb.kernel.wait(running)
    assert "stopped" in running.text
    assert "use: %%distributed --strategy ddp" in running.text
    assert nb(f"%%distributed -d 2{LOOP}").error is None


@pytest.mark.kernel
def test_a_held_step_is_not_dropped_for_a_trial(nb: Notebook) -> None:
    failed = nb.kernel.run(f"%%distributed -d 2{LOOP}    if len(losses) == 5: raise ValueError('now')")
    assert "was kept" in failed.text
    assert "stays kept" in nb(f"%%distributed -d 2 --compare ddp,zero1{LOOP}").stdout
    assert nb("%distributed recover").stdout
    assert nb("print(len(losses))").stdout == "5\n"


@pytest.mark.thorough
@pytest.mark.kernel
def test_what_cannot_have_larger_batches_is_a_row_that_says_so(nb: Notebook) -> None:
    nb(
        "class Few(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
        "        return iter([data[i] for i in range(100)] * 2)"
    )
    nb("loader = DataLoader(Few(), batch_size=8)")
    found = nb(f"%%distributed -d 2 --find-batch --steps 2{LOOP}")
    assert "no more than" in found.text
    assert 8 <= int(next(iter(rows(found).values()))[0].split()[0]) <= 200


@pytest.mark.kernel
def test_what_keep_has_left_on_the_ranks_is_not_lost(nb: Notebook) -> None:
    nb(f"%%distributed -d 2 --keep model{LOOP}")
    assert "--keep" in nb.refused(f"%%distributed -d 2 --compare ddp,zero1 --steps 2{LOOP}")
    nb(f"%%distributed -d 2{LOOP}")
    assert nb("print(len(losses))").stdout == "80\n"


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--compare ddp -s fsdp", "--compare names the strategies"),
        ("--compare ddpp", "did you mean ddp"),
        ("--compare ddp --background", "--background"),
        ("--compare ddp --stage 2", "no option --stage"),
        ("--find-batch --find-model width=1,2", "different things"),
        ("--batch loader", "for %distributed plan and pick"),
        ("--memory much", "--memory 2GB"),
        ("--find-model 3=1,2", "layers=2,4,8"),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(nb: Notebook, line: str, says: str) -> None:
    assert says in nb.refused(f"%%distributed -d 2 {line}{LOOP}")


@pytest.mark.kernel
def test_a_trial_is_no_default_and_needs_all_ranks(nb: Notebook) -> None:
    assert "cannot be a default" in nb.refused("%distributed --compare ddp,fsdp")
    assert "needs all ranks" in nb.refused(f"%%rank 0 --compare ddp{LOOP}")
