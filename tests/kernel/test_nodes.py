"""--nodes in a real kernel: four ranks in two nodes."""

from __future__ import annotations

import json

import pytest

from tests.support.kernels import Kernel
from tests.support.notebook import TRAIN
from tests.support.notebook import Notebook as Cells

pytestmark = pytest.mark.thorough

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
    notebook(f"import json\n{TRAIN}")
    line = "%%distributed -s ddp2 --nodes 2 --devices 4"
    run = notebook(f"{line}\nmodel(next(iter(loader))[0]); opt")
    assert "batch 16 × 2 = 32" in run.text
    assert "each batch is cut over the 2 ranks of a node" in run.text
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
