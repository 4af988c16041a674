"""Asks a keeper what its run does, or to stop it, at the socket where kernels answer."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

from nbtrain.annexes.detached.run_folders import RunFolder
from nbtrain.watch.beacon.client import of_this_user
from nbtrain.watch.beacon.kernel_record import FOLDER, BeaconRecord

PATIENCE = 5.0


def ask(folder: RunFolder, command: str) -> dict[str, Any] | None:
    """The answer; None where nobody listens."""
    record = BeaconRecord.read(Path(folder.about.get("runtime") or folder.path) / FOLDER, f"run-{folder.path.name}")
    if record is None or not record.alive:
        return None
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(record.socket)
            if not of_this_user(connection):
                return None
            connection.sendall(json.dumps({"command": command}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline())
    except (OSError, ValueError):
        return None
    return answer if isinstance(answer, dict) else None
