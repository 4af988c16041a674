"""Which ranks `--nodes 2 --devices 4` means, with an engine whose ranks are on several machines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nbtrain.machine.devices as devices
from nbtrain.base.errors import UsageError
from nbtrain.base.specs import MachinesWanted, PoolSpec
from nbtrain.engines.remote.doors import entrance
from nbtrain.engines.remote.lobby import lobby
from nbtrain.engines.remote.machines import Machine


def pool_spec(
    engine: str, pool: Any, wanted: MachinesWanted, *, oversubscribe: bool, start: str,
    leaving: Callable[[], object] = lambda: None,
) -> PoolSpec:  # fmt: skip
    """Waits for the machines, as only they know what devices they have. `pool`: the engine's class. `leaving`: see
    `entrance`."""
    if start == "fork":
        raise UsageError("--start fork copies the notebook's own process, which is on this machine: leave it out")
    way = entrance(lobby(), engine, pool.door, wanted, leaving)
    count = wanted.nodes or (way.door.nodes if way.door is not None else max(1, len(way.machines())))
    if wanted.most is not None:
        count = max(count, min(wanted.most, len(way.machines())))
    there = [peer.machine for peer in way.wait(count)]
    chosen = [_on(machine, wanted, oversubscribe) for machine in there]
    first = chosen[0]
    for machine, those in zip(there, chosen, strict=True):
        if (those.kind, len(those.names)) != (first.kind, len(first.names)):
            raise UsageError(
                f"{machine} would have {len(those.names)} × {those.kind}, and {there[0]} {len(first.names)} × "
                f"{first.kind}; each machine has as many ranks. Write a number that all of them have: --devices "
                f"{min(len(each.names) for each in chosen)}"
            )
    return PoolSpec(
        engine=engine, start=start, kind=first.kind, devices=tuple(name for each in chosen for name in each.names),
        uuids=tuple(uuid for each in chosen for uuid in each.uuids), oversubscribe=oversubscribe, nodes=count,
        machines=wanted,
    )  # fmt: skip


def _on(machine: Machine, wanted: MachinesWanted, oversubscribe: bool) -> devices.Devices:
    spec, quoted = wanted.devices, wanted.quoted
    if spec == "auto" and wanted.accelerator != "cpu" and machine.here.cards():
        spec, quoted = -1, False
    try:
        return devices.resolve(
            list(spec) if isinstance(spec, tuple) else spec, accelerator=wanted.accelerator,
            oversubscribe=oversubscribe, quoted=quoted, machine=machine.here,
        )  # fmt: skip
    except UsageError as error:
        raise UsageError(f"on {machine.name}: {error}") from None
