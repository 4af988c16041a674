"""Which ranks `--nodes 2 --devices 4` means, with an engine whose ranks are on several machines."""

from __future__ import annotations

import nbtrain.machine.devices as devices
from nbtrain.engines.remote.lobby import lobby
from nbtrain.engines.remote.machines import Machine
from nbtrain.engines.remote.pool import wait_for_machines
from nbtrain.errors import UsageError
from nbtrain.specs import PoolSpec


def pool_spec(
    engine: str, nodes: int | None, spec: devices.Spec, *, accelerator: str, oversubscribe: bool, start: str,
    quoted: bool,
) -> PoolSpec:  # fmt: skip
    """`spec` counts on each machine. `nodes` None: as many as have joined."""
    if start == "fork":
        raise UsageError("--start fork copies the notebook's own process, which is on this machine: leave it out")
    here = lobby()
    count = max(1, len(here.machines())) if nodes is None else nodes
    there = [peer.machine for peer in wait_for_machines(here, count)]
    found = [_on(machine, spec, accelerator, oversubscribe, quoted) for machine in there]
    first = found[0]
    for machine, those in zip(there, found, strict=True):
        if (those.kind, len(those.names)) != (first.kind, len(first.names)):
            raise UsageError(
                f"{machine} would have {len(those.names)} × {those.kind}, and {there[0]} {len(first.names)} × "
                f"{first.kind}; each machine has as many ranks. Write a number that all of them have: --devices "
                f"{min(len(each.names) for each in found)}"
            )
    return PoolSpec(
        engine=engine, start=start, kind=first.kind, devices=tuple(name for each in found for name in each.names),
        uuids=tuple(uuid for each in found for uuid in each.uuids), oversubscribe=oversubscribe, nodes=count,
    )  # fmt: skip


def _on(machine: Machine, spec: devices.Spec, accelerator: str, oversubscribe: bool, quoted: bool) -> devices.Devices:
    if isinstance(spec, str) and spec.strip().lower().startswith("free:"):
        raise UsageError(f"--devices {spec} looks at who uses this machine's GPUs; on several machines write a number")
    if spec == "auto" and accelerator != "cpu" and machine.here.cards():
        spec, quoted = -1, False
    try:
        return devices.resolve(
            spec, accelerator=accelerator, oversubscribe=oversubscribe, quoted=quoted, machine=machine.here
        )
    except UsageError as error:
        raise UsageError(f"on {machine.name}: {error}") from None
