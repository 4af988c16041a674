"""A loss of what all ranks computed: the pairs of a batch, its statistics."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from nbtrain.machine import registry
from tests.support.kernels import Kernel
from tests.support.notebook import TRAIN, Notebook

pytestmark = [pytest.mark.kernel, pytest.mark.slow]

STRATEGIES = (
    "single", "ddp -d 2", "zero1 -d 2", "fsdp -d 2", "deepspeed --stage 2 -d 2", "deepspeed --stage 3 -d 2",
    "horovod -d 2", "pipeline -d 2", "ddp2 -d 2", "dp -d 2",
)  # fmt: skip
PAIRS = """
for x, y in loader:
    z = torch.cat(gather(model(x), sync_grads=True))
    labels = torch.cat(gather(y))
    alike = (labels[:, None] == labels).float()
    loss = (torch.tanh(z @ z.T) - alike).square().mean() + (z - z.mean(0)).square().sum() / 100
    opt.zero_grad(); loss.backward(); opt.step()
"""


MAKE = f"torch.manual_seed(1); {TRAIN}; opt = torch.optim.SGD(model.parameters(), 0.1)"


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook(MAKE + "\ngather = lambda value, **_: [value]")
    notebook(PAIRS + "\nalone = [p.detach().clone() for p in model.parameters()]; del gather")
    yield notebook
    notebook("%distributed stop")


@pytest.mark.sample(first=3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_of_the_whole_batch_has_one_processs_gradients(notebook: Notebook, strategy: str) -> None:
    if not all(map(find_spec, registry.strategy(strategy.split()[0]).needs.packages)):
        pytest.skip(f"{strategy} is not installed")
    notebook(MAKE)
    notebook(f"%%distributed -s {strategy} --split-batches\n{PAIRS}", timeout=110)
    far = "max(float((p - q).detach().abs().max()) for p, q in zip(model.parameters(), alone))"
    assert float(notebook(far).value or "inf") < 1e-5


def test_values_in_the_order_of_the_data_have_no_gradient(notebook: Notebook) -> None:
    said = notebook.kernel.run("%%distributed -s ddp -d 2\ngather(model(X), of=loader, sync_grads=True)").text
    assert "sync_grads=True goes without `of`" in said
