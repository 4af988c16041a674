"""Nodes that a test has started on other machines, which are this one."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil

from tests.support.hygiene import SESSION, describe, gone_within, marked

WEIGHTS = "[p.tolist() for p in model.parameters()]"
"""What a model has come to, to be compared."""


def nodes() -> list[psutil.Process]:
    """Those that live, whoever is their parent, in the order of their machines' names."""
    found = {}
    for process in marked(SESSION, os.environ[SESSION]):
        with suppress(psutil.Error):
            environ = process.environ()
            if process.cmdline()[-3:] == ["-m", "nbtrain", "node"]:
                found[environ.get("NBTRAIN_MACHINE") or environ.get("SLURMD_NODENAME", "")] = process
    return [found[name] for name in sorted(found)]


def no_nodes_within(seconds: float) -> bool:
    return not gone_within(seconds, lambda: [describe(process) for process in nodes()])
