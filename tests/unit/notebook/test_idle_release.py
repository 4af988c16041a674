"""When idle ranks are given back: a clock that runs between cells only."""

from __future__ import annotations

import threading

from nbtrain.notebook.pool.idle_release import IdleRelease


def test_the_clock_runs_between_cells_only() -> None:
    over = threading.Event()

    def release() -> bool:
        over.set()
        return True

    clock = IdleRelease(release, seconds=0.2)
    clock.start()
    clock.stop()
    assert not over.wait(0.4), "a cell had begun"
    clock.start()
    assert over.wait(5)
    clock.stop()
    assert clock.released


def test_what_comes_after_has_no_part_in_the_decision() -> None:
    """A cell that begins while the clock's own thread is still busy with it knows that the ranks are gone."""
    telling, told = threading.Event(), threading.Event()

    def tell() -> None:
        telling.set()
        told.wait(30)

    clock = IdleRelease(lambda: True, seconds=0, after=tell)
    clock.start()
    assert telling.wait(30)
    clock.stop()
    assert clock.released
    told.set()
