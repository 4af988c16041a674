"""What one rank does to a model, or a cell puts where the notebook finds it, is seen by all ranks or said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel, running_kernel
from tests.support.notebook import TRAIN, Notebook


@pytest.fixture(scope="module")
def own_kernel() -> Iterator[Kernel]:
    with running_kernel() as kernel:
        yield kernel


@pytest.fixture
def notebook(own_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(own_kernel)
    yield made
    made("%distributed stop")


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "sharded"])
def test_a_write_on_one_rank_is_said_without_a_step(notebook: Notebook, strategy: str, who: int) -> None:
    line = f"%%distributed -d 2 -s {strategy}\n"
    notebook(TRAIN)
    notebook(line + "for x, y in loader:\n    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()")
    assert "differs" not in notebook(line + "model(X[:2]).sum().item()").text
    written = notebook(line + f"if rank == {who}:\n    with torch.no_grad():\n        model[0].weight.add_(1)").text
    assert "rank 1 differs from rank 0 in model" in written
    assert "differs" not in notebook(line + "model(X[:2]).sum().item()").text, "all have rank 0's again"
    same = notebook(line + "print(len(set(gather(model[0].weight.sum().item()))))").stdout
    assert same.split()[-1] == "1"


@pytest.mark.parametrize(
    ("first", "put"),
    [
        ("box = {}", "box['model']"),
        ("class Box: pass\nbox = Box()", "box.model"),
        ("box = [None]", "box[0]"),
    ],
)
@pytest.mark.parametrize("new", ["nn.Linear(4, 2)", "other"])
def test_a_model_that_a_cell_puts_into_a_container_is_found_by_the_next(
    notebook: Notebook, first: str, put: str, new: str
) -> None:
    """On the rank whose changes come home as on the others: they set it up together."""
    notebook(f"{first}\nother = nn.Linear(4, 2)")
    notebook("%%distributed -d 2\nlen(str(box)), other(X[:2]).sum()")
    notebook(f"%%distributed -d 2\n{put} = {new}")
    notebook(f"%%distributed -d 2\nopt = torch.optim.SGD({put}.parameters(), 0.1)\n"
             f"F.cross_entropy({put}(X[8 * rank:8 * rank + 8]), Y[8 * rank:8 * rank + 8]).backward()\n"
             f"opt.step(); print(len(set(gather({put}.weight.sum().item()))))")  # fmt: skip
    assert notebook(f"%%distributed -d 2\nprint(len(set(gather({put}.weight.sum().item()))))").stdout.split()[-1] == "1"
