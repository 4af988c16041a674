"""Ranks that do the same work in real cells are told so once; those whose batches differ never are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import Notebook

SAID = "ranks computed the same gradients"

STEP = "    F.cross_entropy(model(x), y).backward(); opt.step(); opt.zero_grad()\n"

SAME = {
    "the whole data": f"for _ in range(3):\n    x, y = X, Y\n{STEP}",
    "a generator of its own": (
        "g = torch.Generator().manual_seed(0)\nfor _ in range(3):\n"
        f"    i = torch.randint(96, (8,), generator=g); x, y = X[i], Y[i]\n{STEP}"
    ),
    "slices": f"for i in range(0, 64, 16):\n    x, y = X[i : i + 16], Y[i : i + 16]\n{STEP}",
    "a closure": (
        "search = torch.optim.LBFGS(model.parameters(), max_iter=3)\ndef closure():\n    search.zero_grad()\n"
        "    loss = F.cross_entropy(model(X), Y); loss.backward(); return loss\nsearch.step(closure)"
    ),
}

APART = {
    "a loader": f"for x, y in DataLoader(data, 16):\n{STEP}",
    "a loader of equal samples": f"for x, y in DataLoader(TensorDataset(X * 0 + 1, Y * 0), 16):\n{STEP}",
    "the ranks' own draws": f"for _ in range(4):\n    i = torch.randint(96, (8,)); x, y = X[i], Y[i]\n{STEP}",
    "a part each": f"for _ in range(3):\n    x, y = X[rank::world_size], Y[rank::world_size]\n{STEP}",
    "a penalty first": (
        "for _ in range(3):\n    x, y = X[rank::world_size], Y[rank::world_size]\n"
        f"    sum(p.square().sum() for p in model.parameters()).backward()\n{STEP}"
    ),
    "warming up alike": (
        f"for _ in range(4):\n    x, y = X, Y\n{STEP}"
        f"for _ in range(9):\n    x, y = X[rank::world_size], Y[rank::world_size]\n{STEP}"
    ),
    "a head of zeros": (  # the loss is log(2) for every batch, and the head's bias may have the same gradient
        "nn.init.zeros_(model[2].weight); nn.init.zeros_(model[2].bias)\nfor _ in range(2):\n"
        f"    x, y = X[rank::world_size], Y[rank::world_size]\n{STEP}"
    ),
    "one backward": f"x, y = X, Y\nfor _ in range(1):\n{STEP}",
    "gradients of zeros": "for _ in range(3):\n    (model(X[rank::2]).sum() * 0).backward(); opt.step()",
}  # fmt: skip


@pytest.fixture
def notebook(shared_kernel: Kernel) -> Iterator[Notebook]:
    notebook = Notebook(shared_kernel)
    notebook("model = net(); opt = torch.optim.SGD(model.parameters(), 0.1)")
    yield notebook
    notebook("%distributed stop")


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_do_the_same_are_told_so(notebook: Notebook, strategy: str) -> None:
    same, apart = ({what: f"# {strategy}\n{code}" for what, code in one.items()} for one in (SAME, APART))
    for what, code in same.items():
        if what == "a closure" and strategy != "ddp":
            continue
        shown = notebook(f"%%distributed -s {strategy} -d 2\n{code}").text
        assert shown.count(SAID) == 1, f"{what}\n{shown}"
        assert "X[rank::world_size]" in shown
    assert SAID not in notebook(f"%%distributed -s {strategy} -d 2\n{same['slices']}").text, "once"
    for what, code in apart.items():
        if what == "a penalty first" and strategy == "fsdp":  # refused
            continue
        shown = notebook(f"%%distributed -s {strategy} -d 2\n{code}").text
        assert SAID not in shown, f"{what}\n{shown}"


def test_who_asks_for_the_same_batches_is_not_told(notebook: Notebook) -> None:
    for line in ("-s ddp -d 2 --no-sampler", "-s none -d 2", "-s single -d 1"):
        assert SAID not in notebook(f"%%distributed {line}\n{SAME['slices']}").text


@pytest.mark.thorough
def test_a_data_set_that_was_split_by_rank(notebook: Notebook) -> None:
    loop = f"for x, y in DataLoader(mine, 8):\n{STEP}"
    split = {
        "from torch.utils.data import Subset; mine = Subset(data, range(rank, 96, world_size))": True,
        "mine = TensorDataset(X[rank::world_size], Y[rank::world_size])": True,
        "mine = [(X[i], Y[i]) for i in range(rank, 96, world_size)]": True,
        "mine = TensorDataset(X[::2], Y[::2])": False,
        "mine = data; mine.rank = rank": False,
    }
    for line, told in split.items():
        shown = notebook(f"%%distributed -s ddp -d 2\n{line}\n{loop}").text
        assert ("--no-sampler" in shown) == told, f"{line}\n{shown}"
    first = next(iter(split))
    shown = notebook(
        f"%%distributed -s ddp -d 2 --no-sampler\nseen = 0\n{first}\n{loop}    seen += len(x)\nprint(seen)"
    )
    assert "48" in shown.stdout
    assert "split" not in shown.text


def test_a_stream_that_was_split_by_rank_from_outside(notebook: Notebook) -> None:
    """What it is made of says so: a file list, numbers, a partial. A stream that looks at its rank is left alone."""
    notebook("""
from functools import partial
from torch.utils.data import IterableDataset
class Files(IterableDataset):
    def __init__(self, files): self.files = files
    def __iter__(self):
        for at in self.files: yield from zip(X[24 * at:24 * at + 24], Y[24 * at:24 * at + 24])
class Every(IterableDataset):
    def __init__(self, at, step): self.at, self.step = at, step
    def __iter__(self): return iter(zip(X[self.at::self.step], Y[self.at::self.step]))
import os
def mine(files): return files[int(os.environ["RANK"])::int(os.environ["WORLD_SIZE"])]
class Helped(Files):
    def __iter__(self):
        for at in mine(self.files): yield from zip(X[24 * at:24 * at + 24], Y[24 * at:24 * at + 24])
class Of(IterableDataset):
    def __init__(self, make): self.make = make
    def __iter__(self): return iter(self.make())
def every(at, step): return zip(X[at::step], Y[at::step])
""")
    split = {
        "Files([0, 1, 2, 3][rank::world_size])": True,
        "Every(rank, world_size)": True,
        "Of(partial(every, rank, world_size))": True,
        "Of((lambda at: lambda: every(at, 2))(rank))": True,
        "Helped([0, 1, 2, 3])": True,
        "Files([0, 1, 2, 3])": False,
        "Every(1, 2)": False,
        "Of(partial(every, 0, 1))": False,
    }
    for made, told in split.items():
        shown = notebook(f"%%distributed -s ddp -d 2 --monitor off\nfor x, y in DataLoader({made}, 8):\n{STEP}").text
        assert ("--no-sampler" in shown) == told, f"{made}\n{shown}"


def test_a_sampler_with_random_numbers_of_its_own(notebook: Notebook) -> None:
    notebook("""
import numpy as np, random
class Own(torch.utils.data.Sampler):
    def __init__(self, draw): self.draw = draw
    def __len__(self): return 96
    def __iter__(self): return iter(self.draw())
def unseeded(): return np.random.default_rng().permutation(96).tolist()
def shared(): return np.random.permutation(96).tolist()
held = np.random.default_rng(0)
""")
    apart = {
        "sampler=Own(unseeded)": True,
        "sampler=Own(lambda: random.Random().sample(range(96), 96))": True,
        "shuffle=True, generator=torch.Generator().manual_seed(rank)": True,
        "sampler=Own(shared)": False,
        "sampler=Own(lambda: held.permutation(96).tolist())": False,
        "shuffle=True, generator=torch.Generator().manual_seed(3)": False,
        "shuffle=True": False,
    }
    for given, told in apart.items():
        loop = f"for x, y in DataLoader(data, 8, {given}):\n{STEP}"
        shown = notebook(f"%%distributed -s ddp -d 2 --monitor off\n{loop}").text
        assert ("a sampler has drawn other samples on each rank" in shown) == told, f"{given}\n{shown}"


BY_HAND = {
    "gradients of autograd.grad": """
for x, y in DataLoader(data, 16):
    grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads): p -= 0.1 * g
""",
    "two forwards": """
def move(seed, by):
    own = torch.Generator().manual_seed(seed)
    for p in model.parameters(): p.data.add_(torch.randn(p.shape, generator=own), alpha=by)
with torch.no_grad():
    for i, (x, y) in enumerate(DataLoader(data, 16)):
        move(i, 0.01); up = F.cross_entropy(model(x), y)
        move(i, -0.02); down = F.cross_entropy(model(x), y)
        move(i, 0.01 - 0.1 * float(up - down))
""",
}


@pytest.mark.sample(first=1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_that_are_changed_by_hand_are_those_of_one_process(notebook: Notebook, strategy: str) -> None:
    weights = "found = [p.detach().clone() for p in model.parameters()]"
    for what, code in BY_HAND.items():
        notebook(f"from copy import deepcopy\nbefore = deepcopy(model.state_dict())\n{code}\n{weights}\n"
                 "model.load_state_dict(before)")  # fmt: skip
        notebook(f"%%distributed -s {strategy} -d 2\n{code}")
        assert notebook("all(map(torch.allclose, found, model.parameters()))").value == "True", what
    shared = BY_HAND["gradients of autograd.grad"].replace("0.1 * g", "0.1 * reduce(g)")
    shown = notebook(f"%%distributed -s {strategy} -d 2 --share-eval\n{shared}").text
    assert "from rank 0" not in shown, "the weights are the same"
