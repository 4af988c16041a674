"""What a rank's process knows and does before it is a rank."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from nbtrain.specs import RankInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class RankConfig:
    """What a rank is told when it is born."""

    info: RankInfo
    directory: str
    """private to the user; the channel's sockets and the group's store lie in it"""
    secret: bytes = field(repr=False)
    """by which the kernel knows this process"""
    backend: str
    generation: int
    """which pool of this process's it belongs to"""
    store: str
    """where the process group meets"""
    board: str
    """memory that all ranks and the kernel see"""
    texts: tuple[str, ...]
    """the files behind its file descriptors 1 and 2"""
    stack: str
    """the file in which it says where it is"""
    environ: Mapping[str, str]
    """the kernel's, as it is now: which cards and which network there are is settled when a rank takes its place"""


def dies_with_its_parent() -> None:
    """Linux ends this process when the one that forked it ends, however it ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)
