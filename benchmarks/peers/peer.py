"""What a package has to say to take part: the cells that its users would write for the work of a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "build" / "peers"
"""where .ci/peers makes an environment for each"""


class Cannot(Exception):
    """A package cannot do the work of a row; the message is what the table says."""


class Peer:
    """One package. Its methods return the source of cells; `code` is Python that each rank runs."""

    name: str
    packages: Sequence[str] = ()
    """what pip installs into its environment; nothing: it runs in .venv"""
    within: Sequence[str] = ()
    """beginning of a command that becomes the kernel"""
    interrupts_by_message = False
    """how its kernel is told to stop, as its kernel spec says"""
    keeps_ranks = True
    """ranks live from one cell to the next; otherwise each cell starts them anew"""

    @property
    def python(self) -> Path:
        return MADE / self.name / "bin" / "python"

    def environment(self, ranks: int) -> Mapping[str, str]:
        """What its kernel finds in the environment."""
        return {}

    def start(self, ranks: int) -> list[str]:
        """Cells before the first one that runs on ranks."""
        raise NotImplementedError

    def cell(self, code: str, ranks: int) -> str:
        """A cell in which every rank runs the code; its process group can be used."""
        raise NotImplementedError

    def send(self, code: str, ranks: int) -> str:
        """The same, and the code reads the notebook's `x`."""
        raise NotImplementedError

    def home(self, code: str, ranks: int) -> str:
        """The same, and rank 0's `y` is in the notebook afterwards."""
        raise NotImplementedError

    def make_model(self, make: str, ranks: int) -> list[str]:
        """Cells before the first one that trains. `make` assigns `model`, `optimizer` and `batch`."""
        wrap = "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(model)"
        return [self.cell(f"{make}\n{wrap}", ranks)]

    def train(self, loop: str, ranks: int) -> str:
        """A cell that trains. `loop` is a call, `work.loop(model, optimizer, batch, …)`."""
        return self.cell(loop, ranks)
