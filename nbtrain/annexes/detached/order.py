"""What a kernel hands over to a keeper."""

from __future__ import annotations

from dataclasses import dataclass

from nbtrain.base.messages import KernelEnvironment
from nbtrain.base.specs import RunSpec
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.sync.notebook_side import Outgoing


@dataclass(frozen=True, kw_only=True)
class Order:
    """A cell, how it is to be run, and all that it needs of the notebook."""

    spec: RunSpec
    cell: Cell
    out: Outgoing
    environment: KernelEnvironment
    until: float | None
    """when it is stopped, in seconds since the epoch"""
    runtime: str
    """the folder in which the server looks for kernels, and finds this run; empty: it is found in its own"""
