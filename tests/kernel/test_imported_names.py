"""What a notebook has imported by name from torch does on a rank what it does there under its full name."""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import TRAIN, Notebook

IMPORTS = "from torch.nn.utils import clip_grad_norm_\nfrom torch.autograd import backward\nfrom torch import save"

LOOP = """
for x, y in loader:
    backward(F.cross_entropy(model(x), y))
    norms.append(float(clip_grad_norm_(model.parameters(), 0.05)))
    opt.step(); opt.zero_grad()
"""


@pytest.mark.sample("ddp-warm")
@pytest.mark.kernel
@pytest.mark.parametrize("start", ["warm", "fork"])
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "pipeline"])
def test_functions_that_the_notebook_imported(kernel: Kernel, strategy: str, start: str) -> None:
    notebook = Notebook(kernel)
    notebook(IMPORTS)
    flags = f"%%distributed -s {strategy} --devices 2 --split-batches --start {start}\n"
    for line in (flags, ""):  # a kernel that has computed cannot be forked
        notebook(f"torch.manual_seed(1); {TRAIN}; norms = []")
        notebook(f"{line}{LOOP}")  # the second cell on warm ranks has another parcel
        notebook(f"{line}{LOOP}")
        kept = "alone" if not line else "ranks"
        notebook(f"{kept} = norms, [p.detach().clone() for p in model.parameters()]")
    notebook("torch.testing.assert_close(alone[0], ranks[0], rtol=1e-3, atol=1e-4)")
    notebook("torch.testing.assert_close(alone[1], ranks[1], rtol=1e-3, atol=1e-4)")
