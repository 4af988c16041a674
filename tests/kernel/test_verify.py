"""A cell against one process: what is found equal, what is not, and why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import LOOP, TRAIN, Notebook

MORE = """
def with_(*layers):
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 2))
def state():
    return [p.sum().item() for p in model.parameters()], len(opt.state), torch.get_rng_state().sum().item()
"""


@pytest.fixture
def nb(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook(MORE)
    notebook(TRAIN)
    yield notebook
    notebook("%distributed stop")


def verdict(text: str) -> str:
    return next(line for line in text.splitlines() if line[:1] in "✓≈✗?" and line[1:2] == " ")


@pytest.mark.sample(first=1)
@pytest.mark.kernel
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "deepspeed_stage_3", "pipeline"])
def test_a_plain_loop_is_equal(nb: Notebook, strategy: str) -> None:
    found = nb("before = state()\n%distributed stop\n").text
    found = nb(f"%%distributed -d 2 -s {strategy} --verify --steps 3{LOOP}").text
    assert verdict(found).startswith("✓ equal"), found
    assert "96, each as often as in one process" in found or "48, each" in found
    assert "4 compared" in found, "all of the model's weights"
    assert nb("print(state() == before)").stdout == "True\n", "the notebook is as it was"


@pytest.mark.sample(first=1)
@pytest.mark.kernel
@pytest.mark.parametrize(
    ("layers", "cause"),
    [
        ("nn.Dropout(0.4)", "dropout drops other units"),
        ("nn.BatchNorm1d(8)", "batch norm normalises each rank's own samples"),
    ],
)
def test_what_differs_as_it_has_to_is_named(nb: Notebook, layers: str, cause: str) -> None:
    """In the second epoch, too: what dropout has drawn in the first is not in its order."""
    nb(f"model = with_({layers}); opt = adamw(model)\nloader = DataLoader(TensorDataset(X, Y), 16, shuffle=True)")
    found = nb("%%distributed -d 2 --verify --steps 6\nfor epoch in range(2):" + LOOP.replace("\n", "\n    ")).text
    assert "each as often as in one process" in found
    assert verdict(found).startswith("≈ differs from one process as expected")
    assert cause in found
    assert "both ways give the same weights" in found


@pytest.mark.kernel
def test_a_sum_over_the_batch(nb: Notebook) -> None:
    nb("opt = torch.optim.SGD(model.parameters(), 0.01)")  # Adam does not mind how large gradients are
    found = nb(
        f"%%distributed -d 2 --verify --steps 3{LOOP.replace('y)', 'y, reduction=chr(115) + chr(117) + chr(109))')}"
    )
    assert verdict(found.text).startswith("✗ differs")
    assert "the loss is a sum over the batch" in found.text


@pytest.mark.kernel
def test_a_loss_that_couples_the_samples_of_a_batch(nb: Notebook) -> None:
    """And batches that are no multiple of the ranks. The next cell finds ranks as it wants them."""
    nb("loader = DataLoader(TensorDataset(X[:71], Y[:71]), 16)")
    pairs = "F.normalize(model(x)) @ F.normalize(model(x)).T, torch.arange(len(x))"
    loop = LOOP.replace("model(x), y", pairs)
    found = nb(f"%%distributed -d 2 --verify --steps 3{loop}").text
    assert verdict(found).startswith("✗ differs")
    assert "the loss couples the samples of a batch" in found
    assert "of them twice" in found
    assert "drop_last=True" in found
    assert "new ranks" not in nb(f"%%distributed -d 2{loop}").text
    assert verdict(nb(f"%%distributed -d 2 -s ddp2 --verify --steps 3{loop}").text).startswith("✓ equal")
    assert "new ranks" not in nb("%%distributed -d 2\npass").text


@pytest.mark.kernel
def test_data_that_every_rank_sees(nb: Notebook) -> None:
    nb(
        "import itertools\nclass Stream(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n        return iter(list(zip(X, Y)))\n"
        "class Own(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n        return itertools.islice(iter(list(zip(X, Y))), rank, None, world_size)\n"
        "class Looks(torch.utils.data.IterableDataset):\n"
        "    def __iter__(self):\n        return iter(list(zip(X, Y))) if rank >= 0 else None\n"
        "loader = DataLoader(Stream(), batch_size=16)"
    )
    assert verdict(nb(f"%%distributed -d 2 --verify --steps 3{LOOP}").text).startswith("✓ equal"), "it is dealt out"
    nb("loader = DataLoader(Looks(), batch_size=16)")  # as one that splits by rank does, and does not
    found = nb(f"%%distributed -d 2 --verify --steps 3{LOOP}").text
    assert verdict(found).startswith("✗ differs")
    assert "all 2 ranks saw the same samples" in found
    assert "itertools.islice(data, rank, None, world_size)" in found
    nb("loader = DataLoader(Own(), batch_size=16)")
    assert verdict(nb(f"%%distributed -d 2 --verify --steps 3{LOOP}").text).startswith("✓ equal")


@pytest.mark.kernel
def test_noise_of_each_rank_is_no_rounding(nb: Notebook) -> None:
    noisy = LOOP.replace("model(x)", "model(x + torch.randn_like(x))")
    found = nb(f"%%distributed -d 2 --verify --steps 3{noisy}").text
    assert verdict(found).startswith("✗ differs")
    assert "random numbers" in found


@pytest.mark.thorough
@pytest.mark.kernel
def test_the_cell_that_was_run_last_and_one_by_its_number(nb: Notebook) -> None:
    nb(f"%%distributed -d 2 -s zero1{LOOP}")
    number = nb("len(In) - 2").text.strip()
    nb("%%distributed -d 2\nprint(rank)")
    assert "ddp on 2 ranks" in nb("%distributed verify").text
    found = nb(f"%distributed verify {number} --steps 2").text
    assert "zero1 on 2 ranks against one process · 2 steps of each" in found
    assert verdict(found).startswith("✓ equal")
    assert "is no %%distributed cell" in nb.refused("%distributed verify 1")
    assert "not 'x'" in nb.refused("%distributed verify x")
    failed = nb("%%distributed -d 2 --verify\nif rank: raise KeyError('here')\nloss = model(X).sum()")
    assert "KeyError" in failed.text
    assert "--strategy none" in nb.refused(f"%%distributed -d 2 -s none --verify{LOOP}")
    assert "different things" in nb.refused(f"%%distributed -d 2 --verify --find-batch{LOOP}")
