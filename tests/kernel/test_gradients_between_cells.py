"""Gradients do not travel. A cell that counts on the notebook's, or adds to those that wait on the ranks, says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import running_kernel
from tests.support.notebook import Notebook

pytestmark = pytest.mark.thorough

BACKWARD = "F.cross_entropy(model(X), Y).backward()"
ADDED = "backward has added to gradients that an earlier cell had left"
IN_NOTEBOOK = "the notebook has gradients"
STRATEGIES = ["single", "ddp", "fsdp", "pipeline"]


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    """A kernel of its own: each sentence is said once in a notebook."""
    with running_kernel() as kernel:
        made = Notebook(kernel)
        made("model = net(); opt = torch.optim.SGD(model.parameters(), 1.0)")
        yield made
        made("%distributed stop")


def line(strategy: str) -> str:
    return f"%%distributed -s {strategy} --devices {1 if strategy == 'single' else 2} --monitor off\n"


@pytest.mark.sample("single", "ddp", "fsdp")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backward_that_adds_to_those_of_an_earlier_cell(notebook: Notebook, strategy: str) -> None:
    assert "gradients" not in notebook(line(strategy) + BACKWARD).text
    assert "gradients" not in notebook(f"{line(strategy)}opt.zero_grad(); {BACKWARD}").text
    notebook("opt.zero_grad()")
    assert ADDED in notebook(line(strategy) + BACKWARD).text


@pytest.mark.parametrize(
    ("uses", "strategy"),
    [("opt.step()", "ddp"), ("opt.step()", "pipeline"), *((f"{BACKWARD}; opt.step()", one) for one in STRATEGIES)],
)
def test_those_of_the_notebook(notebook: Notebook, strategy: str, uses: str) -> None:
    notebook(BACKWARD)
    cleared = notebook(f"{line(strategy)}opt.zero_grad(); {BACKWARD}; opt.step(); opt.zero_grad(set_to_none=True)").text
    assert "gradients" not in cleared
    assert IN_NOTEBOOK in notebook(f"{line(strategy)}model; {uses}").text
    notebook("opt.zero_grad()")
    assert "gradients" not in notebook(f"{line(strategy)}model; opt.zero_grad(); {BACKWARD}; opt.step()").text


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_backward_of_another_model_says_nothing_of_them(notebook: Notebook, strategy: str) -> None:
    notebook("other = net()")
    assert "gradients" not in notebook(line(strategy) + BACKWARD).text
    assert "gradients" not in notebook(line(strategy) + BACKWARD.replace("model", "other")).text
    notebook(BACKWARD)
    again = f"other.zero_grad(); {BACKWARD.replace('model', 'other')}"
    assert "gradients" not in notebook(f"{line(strategy)}model; {again}").text
