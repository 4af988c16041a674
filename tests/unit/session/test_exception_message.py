"""Which of the ranks' errors is shown, and opened by a debugger."""

from __future__ import annotations

import pytest

from nbtrain.events import Failed
from nbtrain.session.report.exception_message import first


def failed(rank: int, time: float, text: str, name: str = "ValueError", **more: bool) -> Failed:
    return Failed(rank=rank, time=time, name=name, text=text, lines=(), **more)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ([failed(0, 2.0, "rank 0 at fault"), failed(1, 1.0, "rank 1 at fault")], 0),
        ([failed(1, 1.0, "no"), failed(2, 3.0, "no"), failed(0, 2.0, "closed by peer", "RuntimeError")], 1),
        ([failed(0, 1.0, "", interrupted=True), failed(2, 2.0, "no"), failed(1, 3.0, "no")], 1),
        ([failed(0, 1.0, "no", relayed=True), failed(1, 2.0, "no")], 1),
    ],
)
def test_the_lowest_of_those_that_raised_the_same_as_the_first(told: list[Failed], wanted: int) -> None:
    assert first({one.rank: one for one in told}).rank == wanted
