"""What a machine says of itself when it joins, and which devices its ranks get."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import nbtrain.machine.devices as devices
import nbtrain.machine.host as host
from nbtrain.base.installed_files import installed_versions
from nbtrain.engines.remote.same_machine import Proof, own_proof

MACHINE = "NBTRAIN_MACHINE"
"""in a node's environment: the name that the user has for its machine"""
COMPARED = ("torch", "nbtrain", "numpy", "cloudpickle")
"""packages whose versions are to be the same on all machines, as objects travel between them"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One machine that takes part."""

    name: str
    """what it calls itself"""
    address: str
    """its own, on the way to the kernel"""
    dialed: str
    """the kernel's, by which it was reached"""
    store: int
    """the port at which process groups find each other, if rank 0 is here"""
    here: devices.Machine
    memory: int
    """bytes that may be used"""
    threads: int
    """of a rank, if OMP_NUM_THREADS says so where the node was started; else 0"""
    clock: int
    """its monotonic clock's nanoseconds, as it joined"""
    versions: Mapping[str, str] = field(default_factory=dict)
    proof: Proof = field(default_factory=Proof)
    """what is found there by who is on the same machine"""
    packages: Mapping[str, str] = field(default_factory=dict)
    """plain name of each that is installed → version"""

    def __str__(self) -> str:
        cards = self.here.cards()
        what = f"{len(cards)} GPU{'s' * (len(cards) > 1)}" if cards else f"{self.here.cores} cores"
        return f"{self.name} ({self.address}, {what})"


def this_machine(address: str, dialed: str, store: int) -> Machine:
    return Machine(
        name=_name(), address=address, dialed=dialed, store=store,
        here=devices.here(), clock=time.monotonic_ns(), memory=host.memory().limit,
        versions=versions(), packages=installed_versions(), proof=own_proof(),
        threads=int(told) if (told := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() else 0,
    )  # fmt: skip


def _name() -> str:
    """What the user calls it, where a door knows that; what its queue calls it; its own."""
    return os.environ.get(MACHINE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def versions() -> dict[str, str]:
    """Of Python, and of the packages that objects are made of on their way."""
    there = installed_versions()
    compared = {name: there.get(name, "not installed") for name in COMPARED}
    return {"Python": ".".join(platform.python_version_tuple()[:2]), **compared}


def differences(machines: Sequence[Machine]) -> list[str]:
    """Sentences for versions that a machine has otherwise than the notebook."""
    here = versions() if machines else {}  # it reads files, and each cell asks
    lines = []
    for machine in machines:
        other = [
            f"{name} {machine.versions[name]} (here {here[name]})"
            for name in here
            if machine.versions.get(name, here[name]) != here[name]
        ]
        if other:
            lines.append(
                f"{machine.name} has {', '.join(other)}: install the notebook's, or what travels may not open there"
            )
    return lines


def address_towards(host: str, port: int) -> str | None:
    """This machine's address on the way there; None where there is no way. Nothing is sent: the system only says which
    way it would go."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def own_prefixes() -> tuple[str, ...]:
    """Folders of this Python."""
    return tuple(dict.fromkeys(os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)))


def threads(machine: Machine, ranks: int) -> int:
    return machine.threads or devices.threads_per_rank(ranks, machine.here.cores)
