"""--nodes: the ranks fall into groups of equal size, which a cell, its environment and the status know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.shells import Notebook, notebook


@pytest.fixture
def nb() -> Iterator[Notebook]:
    with notebook() as found:
        yield found


@pytest.mark.parametrize(("line", "world", "nodes"), [
    ("-s ddp2 -d 4", 4, 1), ("-s ddp2 -d 4 --nodes 2", 4, 2), ("-s ddp2 -d 4 --nodes 4", 4, 4),
    ("-s ddp -d 6 --nodes 3", 6, 3), ("-s dp -d 2 --nodes 1", 1, 1),
])  # fmt: skip
def test_groups_of_equal_size(nb: Notebook, line: str, world: int, nodes: int) -> None:
    pool = nb.spec(f"%%distributed {line}\npass").pool
    assert (pool.world_size, pool.nodes) == (world, nodes)


def test_it_can_be_a_default_and_is_the_pools(nb: Notebook) -> None:
    nb.run("%distributed -d 4 --nodes 2 -s ddp2")
    grouped = nb.spec("%%distributed\npass").pool
    assert grouped.nodes == 2
    assert grouped != nb.spec("%%distributed --nodes 1\npass").pool


@pytest.mark.parametrize(("line", "says"), [
    ("-d 3 --nodes 2", "--nodes 2: 3 ranks cannot be 2 groups of equal size; write --devices 4, or another number"),
    ("-d 1 --nodes 2", "--nodes 2: 1 rank cannot be 2 groups of equal size; write --devices 2, or another number"),
    ("-d 4 --nodes 1:2", "--nodes 1:2: machines that come and go need an engine for several: --engine elastic"),
    ("-d 4 --nodes 0", "--nodes 0: --nodes takes a whole number, 1 or more"),
    ("-d 4 --nodes two", "--nodes two: --nodes takes a whole number, 1 or more"),
    ("-d 2 -s dp --nodes 2", "--strategy dp is one process with all the devices, so it cannot be on 2 nodes; --stra"),
])  # fmt: skip
def test_what_cannot_be_is_said(nb: Notebook, line: str, says: str) -> None:
    assert nb.complaint(f"%%distributed {line}\npass").startswith(says)
    assert nb.recorders == []
