"""A loss that sums over a batch: the line that is named gives what one process gives."""

from __future__ import annotations

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook


@pytest.mark.sample(first=1)
@pytest.mark.kernel
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_stage_2"])
def test_the_line_that_is_named_gives_what_one_process_gives(shared_kernel: Kernel, strategy: str) -> None:
    nb = Notebook(shared_kernel)
    nb("import copy; start = net(); Y[torch.rand(len(Y)) < 0.4] = -100; loader = DataLoader(data, batch_size=16)")
    loop = f"# {strategy}\nfor x, y in loader:\n    loss = {{}}\n    loss.backward(); opt.step(); opt.zero_grad()"
    anew = "model = copy.deepcopy(start); opt = torch.optim.SGD(model.parameters(), 0.1)"
    nb(f"{anew}\n{loop.format('F.cross_entropy(model(x), y)')}\nwanted = model")
    line = f"%%distributed -d 2 -s {strategy} --split-batches\n"
    nb(anew)
    assert "divides its loss by a number of its own" in nb(line + loop.format("F.cross_entropy(model(x), y)")).text
    nb(anew)
    mended = 'F.cross_entropy(model(x), y, reduction="sum") * world_size / reduce((y != -100).sum(), "sum")'
    assert "of its own" not in nb(line + loop.format(mended)).text
    same = "all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), wanted.parameters()))"
    assert nb(f"print({same})").stdout == "True\n"
    nb("%distributed stop")
