"""Tells Lightning which rank a process is, and how many there are."""

from __future__ import annotations

import builtins
import os


def on_a_rank() -> bool:
    """Whether this process is one of nbtrain's ranks, and not the notebook."""
    return hasattr(builtins, "world_size")


class Ranks:
    """What Lightning calls a cluster environment. In the notebook it says how many ranks there will be."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0
    """nobody connects to it: the process group is there before Lightning asks"""

    def __init__(self, count: int) -> None:
        self.count = count

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"]) if on_a_rank() else self.count

    def global_rank(self) -> int:
        return int(os.environ["RANK"]) if on_a_rank() else 0

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"]) if on_a_rank() else 0

    def node_rank(self) -> int:
        return int(os.environ["GROUP_RANK"]) if on_a_rank() else 0

    def set_world_size(self, size: int) -> None:
        """Ranks are numbered already."""

    def set_global_rank(self, rank: int) -> None:
        """The same."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """The launcher starts as many ranks as Lightning has devices."""

    def teardown(self) -> None:
        """Ranks stay warm."""
