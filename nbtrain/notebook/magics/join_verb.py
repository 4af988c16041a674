"""`%distributed join`: how another machine takes part. The line for it, or a file with which a queue starts many."""

from __future__ import annotations

import os
import re
import shlex
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from nbtrain.base.errors import UsageError
from nbtrain.base.whole_file import replacing
from nbtrain.notebook.magics import batch_file
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
        return _slurm(request, Path(slurm).expanduser(), hours or FILE_HOURS, force)
    if kubernetes is not None:
        return _kubernetes(request, Path(kubernetes).expanduser(), hours or FILE_HOURS, force, image)
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
        f"on each machine, with the same packages installed, until {_until(hours)}:",
        "",
        f"  {join_line(here, seconds=3600 * hours)}",
        "",
        "Whoever has this line can run code as you: keep it as a password, and clear this output before you share the",
        "notebook. Then, in a cell:",
        f"  {_cell(nodes, request)}",
    ]
    machines = [peer.machine for peer in here.machines()]
    if machines:
        lines += ["", "joined so far:", *(f"  {one}" for one in machines), *differences(machines)]
    return "\n".join(lines)


def _nodes(request: Request) -> int:
    nodes = request.value("nodes")
    if isinstance(nodes, tuple):
        raise UsageError(f"{request.given['nodes'].typed}: a file starts a fixed number: write --nodes {nodes[1]}")
    return int(nodes)


def _slurm(request: Request, path: Path, hours: float, force: bool) -> str:
    from nbtrain.engines.slurm import asked_for, batch_script

    nodes = _nodes(request)
    ticket = path.with_name(path.name + ".ticket").absolute()
    _refuse_existing([path, ticket], force)
    wishes = asked_for(request.value("devices").value, request.value("accelerator"))
    before = (
        f"{batch_file.head(_name(path), nodes, wishes)}"
        f"\n# The ticket, good until {_until(hours)}. Whoever can read that file can run code as you.\n"
        f"NBTRAIN_TICKET=$(cat {shlex.quote(str(ticket))}) || exit\nexport NBTRAIN_TICKET\n\n"
    )
    with replacing(path) as beside:
        Path(beside).write_text(batch_script(nodes, request.value("python"), before))
    _write_private(ticket, _ticket(hours) + "\n")
    return "\n".join((
        f"written: {path}, {ticket}. Have it queued with: sbatch {path}",
        f"It is good until {_until(hours)}, and its nodes leave when the notebook ends. Then, in a cell:",
        f"  {_cell(f'--nodes {nodes}', request)}",
    ))  # fmt: skip


def _kubernetes(request: Request, path: Path, hours: float, force: bool, image: str | None) -> str:
    from nbtrain.engines.slurm import asked_for

    nodes, name = _nodes(request), _name(path)
    _refuse_existing([path], force)
    wanted = f"nbtrain {metadata.version('nbtrain')}, torch {metadata.version('torch').partition('+')[0]}"
    wishes = asked_for(request.value("devices").value, request.value("accelerator"))
    text = MANIFEST.format(
        name=name, nodes=nodes, ticket=_ticket(hours), until=_until(hours), python=request.value("python") or "python",
        image=f"    image: {image}\n" if image else f"    # image: one with {wanted}\n",
        resources="".join(_resources(*wish.split("=")) for wish in wishes),
    )  # fmt: skip
    _write_private(path, text)
    return "\n".join((
        f"written: {path}. Start it with: kubectl apply -f {path}, in the namespace that has its machines",
        *([] if image else [f"Its image has to have {wanted}: --image NAME names one"]),
        f"It is good until {_until(hours)}; kubectl delete -f {path} gives the machines back. Then, in a cell:",
        f"  {_cell(f'--nodes {nodes}', request)}",
    ))  # fmt: skip


MANIFEST = """\
# Machines for a notebook, by Kubeflow Trainer. The ticket is good until {until}. Whoever has it can run code as the
# notebook's user.
apiVersion: v1
kind: Secret
metadata:
  name: {name}-ticket
stringData:
  ticket: {ticket}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {name}
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    numNodes: {nodes}
{image}    command: ["{python}", "-m", "nbtrain", "node"]
    env:
      - name: NBTRAIN_TICKET
        valueFrom:
          secretKeyRef:
            name: {name}-ticket
            key: ticket
{resources}"""


def _resources(flag: str, count: str) -> str:
    what = "nvidia.com/gpu" if "gpu" in flag else "cpu"
    return (
        f'    resourcesPerNode:\n      requests:\n        {what}: "{count}"\n      limits:\n        {what}: "{count}"\n'
    )


def _ticket(hours: float) -> str:
    from nbtrain.engines.remote.lobby import lobby

    return lobby().ticket(seconds=3600 * hours).text()


def _until(hours: float) -> str:
    end = time.localtime(time.time() + 3600 * hours)
    return time.strftime("%H:%M" if hours < 12 else "%H:%M on %d %B", end)


def _cell(nodes: str, request: Request) -> str:
    devices: Any = request.given.get("devices")
    accelerator = request.given.get("accelerator")
    options = [devices.typed if devices else "--devices 4", *([accelerator.typed] if accelerator else [])]
    return f"%%distributed --engine elastic {nodes} {' '.join(options)}"


def _name(path: Path) -> str:
    """As Kubernetes and SLURM take it."""
    return re.sub(r"[^a-z0-9]+", "-", path.name.partition(".")[0].lower()).strip("-")[:40] or "nbtrain"


def _refuse_existing(files: list[Path], force: bool) -> None:
    for one in files:
        if one.exists() and not force:
            raise UsageError(f"{one} is there already: another name, or --force")


def _write_private(path: Path, text: str) -> None:
    """Nobody else can read it at any time."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
