"""A model that a cell puts where the notebook finds it is found by all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    made = Notebook(shared_kernel)
    yield made
    made("%distributed stop")


@pytest.mark.thorough
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
