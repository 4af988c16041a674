"""Machines that join a notebook: nodes on this one, or on the two hosts of networks.py.

with joined(kernel, 2) as machines:
    notebook("%%distributed --engine elastic --nodes 2 --devices 2\\n...")
    machines.nodes[0].kill(); machines.add()
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbtrain.engines.remote.same_machine import APART
from tests.support.kernels import Kernel, running_kernel
from tests.support.notebook import Notebook

RUN: Callable[..., subprocess.Popen[Any]] = subprocess.Popen
TWO = "--engine elastic --nodes 2 --devices 2"


@dataclass
class Machines:
    kernel: Kernel
    folder: Path
    ticket: str
    apart: str = "1"
    """they pass for other machines than the notebook's"""
    nodes: list[subprocess.Popen[Any]] = field(default_factory=list)

    def add(self, run: Callable[..., subprocess.Popen[Any]] = RUN, ticket: str = "") -> subprocess.Popen[Any]:
        """One more. `run`: of a host; `ticket`: another than the notebook's own."""
        temporary = str(self.folder)
        with self.said(len(self.nodes)).open("wb") as file:
            self.nodes.append(
                run(
                    [sys.executable, "-m", "nbtrain", "node", ticket or self.ticket], stdin=subprocess.DEVNULL,
                    stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                    env=os.environ | {"TMPDIR": temporary, "XDG_RUNTIME_DIR": temporary, APART: self.apart},
                )
            )  # fmt: skip
        return self.nodes[-1]

    def said(self, number: int) -> Path:
        """What a node has printed."""
        return self.folder / f"node-{number}.txt"

    def joined(self) -> int:
        """How many are there now."""
        return len(re.findall(r"^  .* cores\)|GPUs?\)$", self.kernel.run("%distributed join").text, re.MULTILINE))


def ticket_of(kernel: Kernel) -> str:
    found = re.search(r"nbtrain-1-[\w-]+", kernel.run("%distributed join").text)
    assert found is not None
    return found[0]


@contextmanager
def notebook_with_machines(count: int = 2, apart: str = "1", **environment: str) -> Iterator[tuple[Notebook, Machines]]:
    """With nbtrain loaded, and a folder for temporary files that lives as long."""
    with tempfile.TemporaryDirectory(prefix="machines-") as folder:
        private = {"TMPDIR": folder, "XDG_RUNTIME_DIR": folder}
        with running_kernel(**private | environment) as kernel:
            notebook = Notebook(kernel)
            with joined(kernel, Path(folder), count, apart) as machines:
                yield notebook, machines


@contextmanager
def joined(kernel: Kernel, folder: Path, count: int = 2, apart: str = "1") -> Iterator[Machines]:
    """So many machines, on their way to the notebook, which must have nbtrain loaded."""
    machines = Machines(kernel, folder, ticket_of(kernel), apart)
    try:
        for _ in range(count):
            machines.add()
        yield machines
    finally:
        for node in machines.nodes:
            node.terminate()
        for node in machines.nodes:
            node.wait(15)
