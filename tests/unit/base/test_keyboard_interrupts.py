"""A press on Stop waits until what must not be cut in two is done."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from nbtrain.base.keyboard_interrupts import presses, shielded


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def python_s_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_a_press_inside_is_raised_at_the_end_of_the_outermost_shield() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), shielded():
        with shielded():
            press()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_an_error_inside_is_told_and_not_the_press() -> None:
    with pytest.raises(ValueError, match="whole"), shielded():
        press()
        raise ValueError("whole")


@pytest.mark.parametrize("count", [False, True], ids=["raises", "counts"])
def test_inside_of_a_count_the_press_counts_after_the_shield(count: bool) -> None:
    handlers = []
    with presses(lambda restore: restore()) as found:
        if count:
            found.only_count()
        try:
            with shielded():
                handlers.append(signal.getsignal(signal.SIGINT))
                press()
                assert found.count == 0
        except KeyboardInterrupt:
            assert not count
        else:
            assert count
    assert handlers == [found.hear]  # nothing is replaced while presses are counted
    assert found.count == count


def test_a_count_inside_of_a_shield_hears_at_once() -> None:
    with shielded():
        with presses(lambda restore: restore()) as found:
            found.only_count()
            press()
            assert found.count == 1
        with shielded():
            pass


def test_while_the_restoring_waits_shields_hold_back_as_ever() -> None:
    later: list[Callable[[], None]] = []
    with presses(later.append) as found:
        found.only_count()
        press()
    done = False
    with shielded():
        press()  # the second half of a double click
        done = True
    assert done
    (restore,) = later
    restore()


def test_other_threads_have_no_shield() -> None:
    ended = []

    def work() -> None:
        with shielded():
            ended.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [signal.default_int_handler]


def test_a_fork_inside_of_a_shield_has_none() -> None:
    with shielded():
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                with shielded():
                    held = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            finally:
                os._exit(0 if held else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
