"""nbtrain: `%%distributed`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers.peer import Peer


class NBTrain(Peer):
    name = "nbtrain"

    @property
    def python(self) -> Path:
        return Path(sys.executable)

    def start(self, ranks: int) -> list[str]:
        return ["%load_ext nbtrain"]

    def cell(self, code: str, ranks: int) -> str:
        return f"%%distributed --devices {ranks}\n{code}"

    send = home = cell

    def make_model(self, make: str, ranks: int) -> list[str]:
        return [make]
