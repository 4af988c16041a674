"""The arguments of `nbtrain.run` and `nbtrain.predict` that say where a function runs, as a line of `%%distributed`."""

from __future__ import annotations

from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.strategies.base import Strategy

NAME = "nbtrain_strategy"
"""that the line has for a strategy of the notebook's"""


def line_of(strategy: Any, devices: Any, accelerator: Any, precision: Any) -> tuple[str, dict[str, Any]]:
    """The line, and the objects that it names. What is left open is as the notebook has it: by
    `%distributed --devices 4`, or auto."""
    named = {NAME: strategy} if isinstance(strategy, Strategy) else {}
    if not named and not isinstance(strategy, str | None):
        raise UsageError(
            f"strategy={type(strategy).__name__} is not among nbtrain's. Write the name of one, with options: "
            "strategy='fsdp --wrap Block'"
        )
    told = {
        "--strategy": NAME if named else strategy, "--accelerator": accelerator, "--devices": _devices(devices),
        "--precision": precision,
    }  # fmt: skip
    return " ".join(f"{flag} {value}" for flag, value in told.items() if value not in (None, "auto")), named


def _devices(devices: Any) -> Any:
    if isinstance(devices, bool):
        raise UsageError("devices=True: how many? devices=2, devices=-1 for all, devices=[0, 2] for these")
    if devices is None or isinstance(devices, int) or (isinstance(devices, str) and "," not in devices):
        return devices
    ids = devices.split(",") if isinstance(devices, str) else devices
    return "[" + ",".join(str(int(device)) for device in ids if str(device).strip()) + "]"
