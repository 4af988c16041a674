"""`--start fork`: what a fork of the kernel does to become a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbtrain.exchange.graph.object_table import ObjectTable
from nbtrain.worker.process.start import RankConfig
from nbtrain.worker.rank import Rank


def body(shell: Any, table: ObjectTable) -> Callable[[RankConfig], None]:
    def live(config: RankConfig) -> None:
        from nbtrain.worker.shell.shell import make_shell

        Rank(config, make_shell(shell.user_module), table).serve()

    return live
