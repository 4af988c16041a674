"""Asks the user for a line in the notebook's input line, as `input()` in a cell does."""

from __future__ import annotations

import builtins
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
from IPython.core.error import StdinNotImplementedError

from nbtrain.compat import kernel
from nbtrain.engines.base import Pool

NO_INPUT = "this front end cannot ask for input, which the debugger needs"
LOOK = 0.1
"""Seconds between two looks whether the question still matters."""


class NoInput(Exception):
    """The front end cannot ask its user anything."""


def check_input(shell: object) -> None:
    """Raises `NoInput` where nobody can type."""
    if not kernel.takes_input(getattr(shell, "kernel", None)):
        raise NoInput(NO_INPUT)


def ask(prompt: str, gone: Callable[[], bool]) -> str | None:
    """The line that the user types. None: he pressed Stop, or it does not matter any more: `gone` is true, which is
    asked in another thread. Raises `NoInput`."""
    try:
        with _raising(), _watched(gone):
            return builtins.input(prompt)
    except KeyboardInterrupt:
        return None
    except EOFError:
        return "q"
    except StdinNotImplementedError:
        raise NoInput(NO_INPUT) from None


def can_answer(pool: Pool, rank: int) -> bool:
    """Whether this rank's process lives. The system is asked: nobody listens for deaths while the user types."""
    if (pid := pool.pids().get(rank)) is None:
        return rank in pool.alive()
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


@contextmanager
def _raising() -> Iterator[None]:
    """Inside, Stop raises at once: a run only counts it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _watched(gone: Callable[[], bool]) -> Iterator[None]:
    """Inside, the main thread is interrupted once `gone` is true: it waits in the front end's socket."""
    main, over, leaving = threading.main_thread().ident, threading.Event(), threading.Lock()

    def watch() -> None:
        while not over.wait(LOOK):
            if gone():
                with leaving:
                    if not over.is_set() and main is not None:
                        signal.pthread_kill(main, signal.SIGINT)
                return

    thread = threading.Thread(target=watch, name="nbtrain-input", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(KeyboardInterrupt), leaving:
            over.set()
        over.set()
