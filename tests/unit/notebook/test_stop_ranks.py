"""When the ranks that a failed one has left behind are freed: at once only where nothing can come of their waiting."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nbtrain.notebook.run.stop_ranks import MOMENT, StopRanks
from nbtrain.worker.loop.shared_board import ABORT, ENTERED, OPEN, WAITING, OwnedBoard

RUN = 7


@pytest.mark.parametrize(
    ("entered", "waiting", "gone", "freed"),
    [
        ((3, 2, 3), (1, 0, 1), True, True),
        ((3, 3, 3), (1, 0, 1), True, False),
        ((3, 2, 2), (1, 0, 1), True, False),
        ((3, 2, 3), (1, 0, 0), True, False),
        ((3, 2, 3), (0.1, 0, 1), True, False),
        ((3, 2, 3), (1, 0, 1), False, False),
    ],
    ids=[
        "rank 1 never entered it", "all have entered it: it may still come to its end",
        "one waits in what rank 1 has entered", "one computes", "one has only just begun to wait", "Stop, and no fault",
    ],
)  # fmt: skip
def test_collectives_are_given_up_at_once(
    tmp_path: Path, entered: tuple[int, ...], waiting: tuple[float, ...], gone: bool, freed: bool
) -> None:
    """Rank 1 of three has ended. `waiting`: for how long the others have waited, in units of twice a moment."""
    board = OwnedBoard(3, str(tmp_path))
    interrupted: list[set[int]] = []
    pool: Any = SimpleNamespace(board=board, interrupt=interrupted.append)
    for rank, part in enumerate(board.parts):
        part[OPEN] = -RUN if rank == 1 else RUN
        part[ENTERED] = entered[rank]
        part[WAITING] = int(time.monotonic_ns() - 2 * MOMENT * waiting[rank]) if waiting[rank] else 0
    try:
        StopRanks(pool, RUN, lambda ranks: None).tick({0, 2}, lost=True, gone=gone)
        assert (board.head[ABORT] == RUN, interrupted) == (freed, [{0, 2}] if freed else [])
    finally:
        board.close()
