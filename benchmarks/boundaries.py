"""What it costs in each step to know the last one that all ranks finished, and in each message that it is sealed."""

from __future__ import annotations

import gc
import pickle
import secrets
import struct
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

from benchmarks.measure import Table, in_turns
from nbtrain.worker.loop.shared_board import OwnedBoard
from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.loop.stopping import Stopping
from nbtrain.worker.parts import Cell
from nbtrain.worker.process.rank_channel import DOWN, Frames, Sealer

PLAIN = struct.Struct("<Q")
OFTEN = 20_000
ROUNDS = 15


def boundaries(table: Table) -> None:
    """A step's end as a rank sees it: counted, told on the board, looked up whether to stop."""
    with tempfile.TemporaryDirectory() as directory:
        board = OwnedBoard(4, directory)
        with_board, without = Steps(1), Steps(1)
        stopping = Stopping(1, with_board)
        stopping.begin(cast(Cell, SimpleNamespace(board=board, number=1, trial=None)))

        def end(steps: Steps) -> float:
            began = time.perf_counter()
            for _ in range(OFTEN):
                steps.armed = steps.under_way = True
                steps.at_boundary()
            return (time.perf_counter() - began) / OFTEN

        ours, bare = in_turns(ROUNDS, lambda: end(with_board), lambda: end(without))
        stopping.end(True)
        board.close()
    told = f"without telling anybody: {1e9 * bare:.0f} ns; what a step does besides: some 100 µs at least"
    table.row("the end of a step: counted, told to all, Stop looked up", 1e6 * ours, 2, "µs", told)


def seals(table: Table) -> None:
    """Both sides of the channel: a frame is made, and found right."""
    for name, size, goal, unit, often in (
        ("a message of 500 bytes", 500, 20, "µs", 2000),
        ("a MB", 1 << 20, 5, "ms", 8),
    ):
        scale = 1e6 if unit == "µs" else 1e3
        sealed, bare = in_turns(ROUNDS, *(_each(way(b"x" * size), often) for way in (_sealed, _bare)))
        told = f"without a seal: {scale * bare:.2f} {unit}; large things do not come this way"
        table.row(f"sealing {name}, and checking it", scale * (sealed - bare), goal, unit, told)


def _each(once: Callable[[], object], often: int) -> Callable[[], float]:
    def measured() -> float:
        gc.collect()
        began = time.perf_counter()
        for _ in range(often):
            once()
        return (time.perf_counter() - began) / often

    return measured


def _sealed(content: bytes) -> Callable[[], object]:
    secret, data = secrets.token_bytes(32), pickle.dumps(content, 5)
    sealer, frames = Sealer(secret, DOWN), Frames(secret, DOWN)
    frames.feed(sealer.frame(pickle.dumps(b"", 5)))  # a first frame may not be long
    return lambda: frames.feed(sealer.frame(data))


def _bare(content: bytes) -> Callable[[], None]:
    """The same frames, looked at as the others are, without a hash."""
    data, buffer = pickle.dumps(content, 5), bytearray()

    def once() -> None:
        buffer.extend(PLAIN.pack(len(data)) + data)
        (size,) = PLAIN.unpack_from(buffer)
        found = bytes(buffer[PLAIN.size : PLAIN.size + size])
        del buffer[: PLAIN.size + size]
        pickle.loads(found)

    return once
