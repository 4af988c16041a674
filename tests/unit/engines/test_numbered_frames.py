"""Frames arrive once and in order, whatever a connection loses."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

import nbtrain.engines.remote.numbered_frames as numbered_frames
from nbtrain.engines.remote.numbered_frames import HEAD, LONGEST, PIECE, WINDOW, Frame, NumberedFrames


class Ends:
    """Two ends and what is under way between them."""

    def __init__(self) -> None:
        self.there = True
        self.way: dict[str, list[list[bytes]]] = {"a": [], "b": []}
        self.a = NumberedFrames(lambda parts: self._post("a", parts))
        self.b = NumberedFrames(lambda parts: self._post("b", parts))
        self.got: dict[str, list[bytes]] = {"a": [], "b": []}

    def _post(self, end: str, parts: Sequence[Frame]) -> bool:
        if self.there:
            self.way[end].append([bytes(part) for part in parts])
        return self.there

    def turn(self, lose: float = 0.0, draw: random.Random | None = None) -> None:
        for end, other, name in (("a", self.b, "b"), ("b", self.a, "a")):
            under_way, self.way[end] = self.way[end], []
            for parts in under_way:
                if draw is not None and draw.random() < lose:
                    continue
                content = other.heard(parts)
                if content:
                    self.got[name].append(bytes(content[0]))
        for end in (self.a, self.b):
            end.pump()


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_with_a_connection(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered_frames, "PATIENCE", 0.0)
    draw, ends = random.Random(seed), Ends()
    for number in range(300):
        ends.a.send(b"%d" % number)
        if draw.random() < 0.2:
            ends.there = draw.random() < 0.7
        ends.turn(0.3, draw)
    ends.there = True
    for _ in range(400):
        ends.a.beat()
        ends.b.beat()
        ends.turn(0.2, draw)
        if ends.a.idle:
            break
    assert ends.got["b"] == [b"%d" % number for number in range(300)]


def test_no_more_is_under_way_than_the_window_and_what_is_urgent_overtakes_it() -> None:
    ends, piece = Ends(), bytes(WINDOW // 4)
    for _ in range(16):
        ends.a.send(piece)
    ends.a.pump()
    assert len(ends.way["a"]) == 4
    ends.a.urge(b"stop")
    ends.turn()
    assert ends.got["b"][4] == b"stop"
    for _ in range(20):
        ends.turn()
    assert len(ends.got["b"]) == 17


def test_one_frame_that_is_larger_than_the_window_goes_alone() -> None:
    ends = Ends()
    ends.a.send(b"first")
    ends.a.send(bytes(2 * WINDOW))
    for _ in range(5):
        ends.turn()
    assert [len(one) for one in ends.got["b"]] == [5, 2 * WINDOW]


def test_long_parts_are_cut_on_the_way_and_whole_afterwards() -> None:
    """What comes in is limited, as ZeroMQ makes room for a part before it knows whose it is."""
    ends = Ends()
    parts = [b"said", os.urandom(3 * PIECE), b"", os.urandom(2 * PIECE + 1), memoryview(os.urandom(PIECE))]
    ends.a.send(*parts)
    ends.a.pump()
    (frame,) = ends.way["a"]
    assert max(map(len, frame)) <= PIECE < LONGEST
    content = ends.b.heard(frame)
    assert content is not None
    assert list(map(bytes, content)) == list(map(bytes, parts))
    assert ends.b.bytes_received == ends.a.bytes_sent == sum(map(len, parts))


def test_a_frame_that_comes_again_is_not_read_again() -> None:
    ends = Ends()
    ends.a.send(b"once")
    ends.a.pump()
    frame = ends.way["a"][0]
    assert ends.b.heard(frame) == frame[1:]
    assert ends.b.heard(frame) is None
    assert HEAD.unpack(frame[0])[1] == 1
