"""What a rank's process is told when it is started (by `engines/_local`), and sets up first."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from nbtrain.base.specs import RankInfo

ASK = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""The kernel sends this signal to have a rank's stack written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankConfig:
    """What a rank's process is given when it starts."""

    info: RankInfo
    directory: str
    """private to the user; the channel's sockets and the group's store lie in it"""
    secret: bytes = field(repr=False)
    """proves to the kernel that it is this process"""
    backend: str
    generation: int
    """number of the kernel's pool that it belongs to"""
    store: str
    """file of the process group's store; `tcp://host:port/name` where ranks are on several machines"""
    board: str
    """memory that all ranks and the kernel see"""
    texts: tuple[str, ...]
    """the files behind its file descriptors 1 and 2"""
    stack: str
    """the file that its stack is written to"""
    last_place: str
    """the file in which it notes where the cell is"""
    early: bool
    """it may start before what only training needs is imported (`rank_imports.py`)"""
    address: str = ""
    """this machine's, where ranks are on others too"""
    master: str = ""
    """of rank 0's machine"""
    shares_cards: bool = False
    """some of the ranks have a card together"""
    environ: Mapping[str, str]
    """the kernel's, as it is now: which cards and which network there are is settled when a rank takes its place"""


def dies_with_its_parent() -> None:
    """Linux ends this process when the one that forked it ends, however it ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        signalled_with_its_parent(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def signalled_with_its_parent(number: int) -> None:
    """Linux sends this process the signal when the one that forked it ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def print_error() -> None:
    """The traceback, in one piece, to where the kernel reads the last words of a process that is gone."""
    with suppress(OSError):
        os.write(2, traceback.format_exc().encode(errors="replace"))


def answer_in(path: str) -> None:
    """Have the stack written to this file, which the kernel has made, whenever ASK comes, and before a crash.

    The interpreter's own signal handler does it, also while the main thread computes in C: no lock is taken, no Python
    runs, and system calls that the signal strikes are restarted.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    faulthandler.register(ASK, file, all_threads=False)
    faulthandler.enable(file, all_threads=False)
