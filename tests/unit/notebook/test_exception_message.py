"""Which of the ranks' errors is shown, and opened by a debugger."""

from __future__ import annotations

from typing import Any

import pytest

from nbtrain.base.events import Failed
from nbtrain.notebook.report.error_hints import LOST_CARD, hint
from nbtrain.notebook.report.exception_message import exception, first


def failed(rank: int, time: float, text: str, name: str = "ValueError", **more: bool) -> Failed:
    return Failed(rank=rank, time=time, name=name, text=text, lines=(), **more)


@pytest.mark.parametrize(("told", "wanted"), [
    ([failed(0, 2.0, "rank 0 at fault"), failed(1, 1.0, "rank 1 at fault")], 0),
    ([failed(1, 1.0, "no"), failed(2, 3.0, "no"), failed(0, 2.0, "closed by peer", "RuntimeError")], 1),
    ([failed(0, 1.0, "", interrupted=True), failed(2, 2.0, "no"), failed(1, 3.0, "no")], 1),
    ([failed(0, 1.0, "no", relayed=True), failed(1, 2.0, "no")], 1),
])  # fmt: skip
def test_the_lowest_of_those_that_raised_the_same_as_the_first(told: list[Failed], wanted: int) -> None:
    assert first({one.rank: one for one in told}).rank == wanted


def text(told: list[Failed], stuck: tuple[int, ...] = ()) -> str:
    by_rank = {one.rank: one for one in told}
    error = exception(by_rank, stuck, 3, "", lambda rank, packed: None, lambda failed: "", {})
    return str(error.__cause__)


def test_what_became_of_ranks_whose_gpu_was_lost_or_waited_for_one() -> None:
    told = [failed(2, 1.0, "CUDA error", "AcceleratorError", card_lost=True)]
    told += [failed(0, 2.0, "given up", "RuntimeError", interrupted=True)]
    said = text(told, (1,))
    assert "raised on rank 2; rank 0 was stopped where the GPU waited for that; rank 1 did not end" in said
    assert "rank 2 can use the GPU no more, and was replaced. The notebook is as it was" in said


def test_what_a_lost_gpu_means_is_said() -> None:
    found: Any = None  # the notebook's side is not asked
    assert hint(failed(0, 1.0, "CUDA error", "AcceleratorError", card_lost=True), {}, (), found) == LOST_CARD
