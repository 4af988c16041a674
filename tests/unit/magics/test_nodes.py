"""--nodes: the ranks fall into groups of equal size, which a cell, its environment and the status know."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import TRAIN
from tests.support.notebook import Notebook as Cells
from tests.support.shells import Notebook, notebook


@pytest.fixture
def nb() -> Iterator[Notebook]:
    with notebook() as found:
        yield found


@pytest.mark.parametrize(
    ("line", "world", "nodes"),
    [
        ("-s ddp2 -d 4", 4, 1),
        ("-s ddp2 -d 4 --nodes 2", 4, 2),
        ("-s ddp2 -d 4 --nodes 4", 4, 4),
        ("-s ddp -d 6 --nodes 3", 6, 3),
        ("-s dp -d 2 --nodes 1", 1, 1),
    ],
)
def test_groups_of_equal_size(nb: Notebook, line: str, world: int, nodes: int) -> None:
    pool = nb.spec(f"%%distributed {line}\npass").pool
    assert (pool.world_size, pool.nodes) == (world, nodes)


def test_it_can_be_a_default_and_is_the_pools(nb: Notebook) -> None:
    nb.run("%distributed -d 4 --nodes 2 -s ddp2")
    grouped = nb.spec("%%distributed\npass").pool
    assert grouped.nodes == 2
    assert grouped != nb.spec("%%distributed --nodes 1\npass").pool


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-d 3 --nodes 2", "--nodes 2: 3 ranks cannot be 2 groups of equal size; write --devices 4, or another number"),
        ("-d 1 --nodes 2", "--nodes 2: 1 rank cannot be 2 groups of equal size; write --devices 2, or another number"),
        (
            "-d 4 --nodes 1:2",
            "--nodes 1:2: MIN:MAX is for an engine whose nodes come and go, and there is none in this",
        ),
        ("-d 4 --nodes 0", "--nodes 0: --nodes takes a whole number, 1 or more"),
        ("-d 4 --nodes two", "--nodes two: --nodes takes a whole number, 1 or more"),
        (
            "-d 2 -s dp --nodes 2",
            "--strategy dp is one process with all the devices, so it cannot be on 2 nodes; --stra",
        ),
    ],
)
def test_what_cannot_be_is_said(nb: Notebook, line: str, says: str) -> None:
    assert nb.complaint(f"%%distributed {line}\npass").startswith(says)
    assert nb.recorders == []


ASK = """
import os
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
every = [None] * world_size
torch.distributed.all_gather_object(every, [rank, local_rank, *(int(os.environ[name]) for name in names)])
spoken, hits = gather(rank), reduce(len(data) // 2, "sum")
shares = [None] * world_size
torch.distributed.all_gather_object(shares, [x.sum().item() for x, _ in DataLoader(data, batch_size=16)])
"""


@pytest.mark.kernel
def test_four_ranks_in_two_nodes(shared_kernel: Kernel) -> None:
    notebook = Cells(shared_kernel)
    notebook(f"import json\n{TRAIN}\nseen = []")
    line = "%%distributed -s ddp2 --nodes 2 --devices 4"
    run = notebook(
        line
        + """
for x, y in loader:
    out = model(x)
    loss = F.cross_entropy(out, y)
    loss.backward(); opt.step(); opt.zero_grad()
    seen.append((len(x), len(out)))
"""
    )
    assert "batch 16 × 2 = 32" in run.text
    assert "each batch is cut over the 2 ranks of a node" in run.text
    assert notebook("print(seen)").stdout == f"{[(16, 16)] * 3}\n"
    run = notebook(f"{line} --split-batches\nfor x, y in loader: pass")
    assert "batch 16 split over 2 groups of ranks" in run.text
    run = notebook(line + ASK)
    assert "ranks 0 and 1 see the same batches, so rank 0 speaks for both" in run.text
    every, spoken, hits, shares = json.loads(notebook("print(json.dumps([every, spoken, hits, shares]))").stdout)
    assert every == [
        [0, 0, 0, 4, 0, 2, 0, 2],
        [1, 1, 1, 4, 1, 2, 0, 2],
        [2, 0, 2, 4, 0, 2, 1, 2],
        [3, 1, 3, 4, 1, 2, 1, 2],
    ]
    assert (spoken, hits) == ([0, 2], 96)
    assert shares[0] == shares[1] != shares[2] == shares[3]
    status = notebook("%distributed status").stdout
    assert status.startswith("4 ranks in 2 nodes · local, warm · gloo")
    assert ["node 0" in line for line in status.splitlines()[1:5]] == [True, True, False, False]
    assert ["node 1" in line for line in status.splitlines()[1:5]] == [False, False, True, True]
    notebook("%distributed stop")
