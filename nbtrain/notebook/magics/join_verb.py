"""`%distributed join`: how another machine takes part. Files with which a queue starts many are an annex's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.notebook import annexes
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.line.split_line import Word
from nbtrain.notebook.magics.state import MagicsState

TAKES = (
    "--nodes N, --devices N, --accelerator, --python, --hours H, --slurm FILE, --kubernetes FILE, --image NAME, --force"
)
LINE_HOURS = 1.0
"""How long a line is good: it is pasted at once."""
FILE_HOURS = 24.0
"""A file's is used after some waiting in a queue."""
LONGEST = 24.0 * 365


def join(state: MagicsState, request: Request) -> str:
    own = dict(request.own)
    if words := request.words[1:]:
        raise UsageError(f"join takes no arguments, and got {words[0].plain!r}")
    slurm, kubernetes = _value("--slurm", "job.sbatch", own), _value("--kubernetes", "job.yaml", own)
    image = _value("--image", "registry/name:tag", own)
    hours = _hours(own)
    force = own.pop("--force", Word("")) is None
    if own:
        raise UsageError(f"join has no option {next(iter(own))}; it takes {TAKES}")
    if slurm is not None and kubernetes is not None:
        raise UsageError("join writes one file: --slurm FILE, or --kubernetes FILE")
    if image is not None and kubernetes is None:
        raise UsageError("--image is for --kubernetes FILE")
    if slurm is not None:
        return str(annexes.need("join --slurm", request, Path(slurm).expanduser(), hours or FILE_HOURS, force))
    if kubernetes is not None:
        return str(
            annexes.need("join --kubernetes", request, Path(kubernetes).expanduser(), hours or FILE_HOURS, force, image)
        )
    return _line(request, hours or LINE_HOURS)


def _value(flag: str, example: str, own: dict[str, Word | None]) -> str | None:
    if flag not in own:
        return None
    word = own.pop(flag)
    if word is None or not word.plain:
        raise UsageError(f"{flag} needs a value: {flag} {example}")
    return word.plain


def _hours(own: dict[str, Word | None]) -> float | None:
    text = _value("--hours", "8", own)
    if text is None:
        return None
    try:
        hours = float(text)
    except ValueError:
        hours = 0.0
    if not 0 < hours <= LONGEST:
        raise UsageError(f"--hours {text}: --hours takes a number of hours, more than 0")
    return hours


def _line(request: Request, hours: float) -> str:
    from nbtrain.engines.remote.doors import join_line
    from nbtrain.engines.remote.lobby import lobby  # on use: most notebooks stay on one machine
    from nbtrain.engines.remote.machines import differences

    here = lobby()
    nodes = request.given["nodes"].typed if "nodes" in request.given else "--nodes 2"
    lines = [
        f"on each machine, with the same packages installed, until {until(hours)}:",
        "",
        f"  {join_line(here, seconds=3600 * hours)}",
        "",
        "Whoever has this line can run code as you: keep it as a password, and clear this output before you share the",
        "notebook. Then, in a cell:",
        f"  {cell_line(nodes, request)}",
    ]
    machines = [peer.machine for peer in here.machines()]
    if machines:
        lines += ["", "joined so far:", *(f"  {machine}" for machine in machines), *differences(machines)]
    return "\n".join(lines)


def nodes_of(request: Request) -> int:
    nodes = request.value("nodes")
    if isinstance(nodes, tuple):
        raise UsageError(f"{request.given['nodes'].typed}: a file starts a fixed number: write --nodes {nodes[1]}")
    return int(nodes)


def until(hours: float) -> str:
    end = time.localtime(time.time() + 3600 * hours)
    return time.strftime("%H:%M" if hours < 12 else "%H:%M on %d %B", end)


def cell_line(nodes: str, request: Request) -> str:
    devices: Any = request.given.get("devices")
    accelerator = request.given.get("accelerator")
    options = [devices.typed if devices else "--devices 4", *([accelerator.typed] if accelerator else [])]
    return f"%%distributed --engine elastic {nodes} {' '.join(options)}"
