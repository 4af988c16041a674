"""The tables of `make tables`: a few of their rows, on a small model, through a real kernel."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from benchmarks.tables_cells import NOTEBOOK
from benchmarks.tables_layout import Sheet
from benchmarks.tables_probe import MB, Failed, Lab, Shape
from benchmarks.tables_rows import dividing, rows
from nbtrain import registry
from nbtrain.planning.compare.comparison import largest
from tests.support.kernels import Kernel, running_kernel

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")

SHAPE = Shape.of(2, layers=4)


@pytest.fixture(scope="module")
def opened() -> Iterator[Kernel]:
    with running_kernel() as found:
        for cell in ("%load_ext nbtrain", NOTEBOOK):
            shown = found.run(cell)
            assert shown.error is None, shown.text
        yield found


@pytest.fixture
def notebook(opened: Kernel) -> Iterator[Kernel]:
    yield opened
    opened.run("%distributed stop")


@pytest.mark.thorough
@pytest.mark.kernel
@pytest.mark.limit(120)
def test_what_is_divided_takes_less(notebook: Kernel) -> None:
    # Of many blocks: how many are whole at the peak depends on how far communication is behind; one is to be little.
    shape = Shape.of(8, layers=12)
    size = 4 * shape.parameters
    ddp = Lab(notebook, "-s ddp --bucket-mb 1 --devices 2", 4).measure(shape, 4, seconds=0.2)
    assert len(ddp.peaks) == 2
    assert ddp.rate > 0
    # Parameters, gradients and two states at the least; a batch of four adds no second model.
    assert 4 * size < min(ddp.peaks) <= ddp.most < 6 * size
    fsdp = Lab(notebook, "-s fsdp --devices 2", 4).measure(shape, 4)
    assert fsdp.rate == 0
    assert fsdp.most < ddp.most - 1.5 * size
    shown = notebook.run("print(sum(p.numel() for p in model.parameters()))")
    assert int(shown.stdout) == shape.parameters


@pytest.mark.thorough
@pytest.mark.kernel
@pytest.mark.limit(120)
def test_a_larger_batch_takes_more_and_ranks_are_the_same(notebook: Kernel) -> None:
    lab = Lab(notebook, "-s ddp --bucket-mb 1 --devices 2", 4)
    small, large, again = (lab.measure(SHAPE, batch).most for batch in (4, 32, 4))
    assert large > small + 10 * MB
    assert abs(again - small) < 3 * MB


@pytest.mark.kernel
@pytest.mark.limit(120)
def test_every_rank_of_a_pipeline_is_measured(notebook: Kernel) -> None:
    first, last = Lab(notebook, "-s pipeline --balance 1,5 --devices 2", 4).measure(SHAPE, 4).peaks
    assert last > first + 3 * 4 * SHAPE.parameters  # it has all blocks


@pytest.mark.kernel
def test_what_does_not_go_is_a_reason(notebook: Kernel) -> None:
    text = "no such\\nluck"
    notebook.run(
        f"import nbtrain\nclass Broken(nbtrain.Strategy):\n    def set_up(self, *_): raise ValueError('{text}')"
    )
    with pytest.raises(Failed, match=r"^ValueError: no such$"):
        Lab(notebook, "-s Broken --devices 2", 4)
    with pytest.raises(Failed, match="no such strategy"):
        Lab(notebook, "-s ddpp --devices 2", 4)


def test_every_strategy_is_a_row() -> None:
    for ranks in (2, 4):
        names = [row.name for row in rows(ranks, 1)]
        for name, entry in registry.STRATEGIES.items():
            assert (name in names) == (name != "none" and entry.needs.min_ranks <= ranks), name
        assert len(names) == len(set(names))
    deepspeed = {row.name for row in rows(2, 1) if row.name.startswith("deepspeed") and not row.lacks}
    assert deepspeed in ({"deepspeed", "deepspeed_stage_1", "deepspeed_stage_3"}, set())
    assert dividing(2, 1)[0].name == "ddp"
    assert "fsdp" in [row.name for row in dividing(2, 1)]


@pytest.mark.parametrize("limit", [0, 1, 2, 5, 8, 30, 100, 1000])
@pytest.mark.parametrize("guess", [1, 4, 50])
def test_the_search_finds_the_largest(limit: int, guess: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = largest(fits, guess)
    assert found <= limit <= found + max(0, int(0.1 * found))
    assert min(tried) >= 1
    assert max(tried) <= max(guess, 2 * limit, 1)
    assert len(tried) == len(set(tried)) <= 16


def test_a_table_in_text_and_markdown() -> None:
    sheet = Sheet("two strategies", ("strategy", "MB", ""))
    sheet.row("ddp", "100")
    sheet.failed("xla", "no: a|b " + "word " * 20)
    lines = sheet.text().splitlines()
    assert lines[1] == "two strategies"
    assert lines[3].startswith("strategy   MB")
    assert lines[5] == "ddp       100"
    assert all(len(line) < 80 for line in lines)
    assert "| ddp | 100 |  |" in sheet.markdown()
    assert "a\\|b" in sheet.markdown()
