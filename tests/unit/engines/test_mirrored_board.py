"""The board of a pool on several machines: what a rank wrote is there on the others, times by their own clocks."""

from __future__ import annotations

import mmap

import pytest

from nbtrain.engines.remote.mirrored_board import Outgoing, as_here, everything, write
from nbtrain.worker.loop.shared_board import CELL, MARKS, STEPS, WAITING, WIDTH, Board, size


@pytest.fixture
def boards() -> tuple[Board, Board]:
    return Board(mmap.mmap(-1, size(4)), 4), Board(mmap.mmap(-1, size(4)), 4)


def test_only_what_changed_of_the_own_ranks_is_sent(boards: tuple[Board, Board]) -> None:
    here, there = boards
    outgoing = Outgoing(here, [1, 2])
    here.parts[1][STEPS], here.parts[2][CELL], here.parts[3][STEPS] = 7, 8, 9
    words = outgoing.changes()
    assert sum(len(values) for _, values in words.values()) == 16
    write(there, words)
    assert (there.parts[1][STEPS], there.parts[2][CELL], there.parts[3][STEPS]) == (7, 8, 0)
    assert outgoing.changes() == {}


def test_nothing_is_left_of_a_rank_that_had_the_number_before(boards: tuple[Board, Board]) -> None:
    """A word that is zero again has not changed here, and stands otherwise there."""
    here, there = boards
    at = MARKS + 3 * WIDTH
    there.parts[1][at], there.parts[1][at + 1], there.parts[2][CELL] = 6, 2, 8
    outgoing = Outgoing(here, [1], again=True)
    here.parts[1][at] = 7  # with a word of zero behind it
    write(there, outgoing.changes())
    assert (there.parts[1][at], there.parts[1][at + 1], there.parts[2][CELL]) == (7, 0, 8)
    assert outgoing.changes() == {}


def test_an_entry_is_believed_once_it_is_whole(boards: tuple[Board, Board]) -> None:
    """The number is what others wait for: it is written after the words that belong to it."""
    here, there = boards
    outgoing = Outgoing(here, [0])
    at = MARKS + 5 * WIDTH
    for word in range(WIDTH):
        here.parts[0][at + word] = 100 + word

    written: list[int] = []

    class Watched:
        def __setitem__(self, place: int, value: int) -> None:
            written.append(place)

    there.parts[0] = Watched()  # type: ignore[assignment]
    write(there, outgoing.changes())
    assert sorted(written) == list(range(at, at + WIDTH))
    assert written[-1] == at


def test_a_time_is_by_the_reader_s_clock_and_none_stays_none(boards: tuple[Board, Board]) -> None:
    here, there = boards
    outgoing = Outgoing(here, [0, 1])
    here.parts[0][WAITING], here.parts[1][STEPS] = 1000, 1
    write(there, outgoing.changes(), clock=50)
    assert (there.parts[0][WAITING], there.parts[1][WAITING]) == (1050, 0)
    here.parts[0][WAITING] = 0
    words = outgoing.changes()
    write(there, words, clock=50)
    assert there.parts[0][WAITING] == 0
    assert as_here(there, {0: [words[0][0], words[0][0]]})[0] == (words[0][0], bytes(8))


def test_a_machine_that_comes_later_is_told_everything(boards: tuple[Board, Board]) -> None:
    here, there = boards
    here.parts[0][STEPS], here.parts[0][MARKS + WIDTH], here.parts[2][CELL] = 4, 7, 9
    write(there, everything(here, [0, 1, 2]))
    assert [part.tolist() for part in there.parts] == [part.tolist() for part in here.parts]
