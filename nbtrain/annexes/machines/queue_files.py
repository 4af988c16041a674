"""Files with which a queue starts many machines: `%distributed join --slurm FILE`, `--kubernetes FILE`."""

from __future__ import annotations

import os
import re
import shlex
from importlib import metadata
from pathlib import Path

from nbtrain.annexes import batch_file
from nbtrain.annexes.machines.slurm import asked_for, batch_script
from nbtrain.base.atomic_write import refuse_existing, replacing
from nbtrain.engines.remote.lobby import lobby
from nbtrain.notebook.magics.join_verb import cell_line, nodes_of, until
from nbtrain.notebook.magics.line.parse import Request


def slurm(request: Request, path: Path, hours: float, force: bool) -> str:
    nodes = nodes_of(request)
    ticket = path.with_name(path.name + ".ticket").absolute()
    refuse_existing([path, ticket], force)
    wishes = asked_for(request.value("devices").value, request.value("accelerator"))
    before = (
        f"{batch_file.head(_name(path), nodes, wishes)}"
        f"\n# The ticket, good until {until(hours)}. Whoever can read that file can run code as you.\n"
        f"NBTRAIN_TICKET=$(cat {shlex.quote(str(ticket))}) || exit\nexport NBTRAIN_TICKET\n\n"
    )
    with replacing(path) as beside:
        Path(beside).write_text(batch_script(nodes, request.value("python"), before))
    _write_private(ticket, _ticket(hours) + "\n")
    return "\n".join((
        f"written: {path}, {ticket}. Have it queued with: sbatch {path}",
        f"It is good until {until(hours)}, and its nodes leave when the notebook ends. Then, in a cell:",
        f"  {cell_line(f'--nodes {nodes}', request)}",
    ))  # fmt: skip


def kubernetes(request: Request, path: Path, hours: float, force: bool, image: str | None) -> str:
    nodes, name = nodes_of(request), _name(path)
    refuse_existing([path], force)
    wanted = f"nbtrain {metadata.version('nbtrain')}, torch {metadata.version('torch').partition('+')[0]}"
    wishes = asked_for(request.value("devices").value, request.value("accelerator"))
    text = MANIFEST.format(
        name=name, nodes=nodes, ticket=_ticket(hours), until=until(hours), python=request.value("python") or "python",
        image=f"    image: {image}\n" if image else f"    # image: one with {wanted}\n",
        resources="".join(_resources(*wish.split("=")) for wish in wishes),
    )  # fmt: skip
    _write_private(path, text)
    return "\n".join((
        f"written: {path}. Start it with: kubectl apply -f {path}, in the namespace that has its machines",
        *([] if image else [f"Its image has to have {wanted}: --image NAME names one"]),
        f"It is good until {until(hours)}; kubectl delete -f {path} gives the machines back. Then, in a cell:",
        f"  {cell_line(f'--nodes {nodes}', request)}",
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
    return lobby().ticket(seconds=3600 * hours).text()


def _name(path: Path) -> str:
    """As Kubernetes and SLURM take it."""
    return re.sub(r"[^a-z0-9]+", "-", path.name.partition(".")[0].lower()).strip("-")[:40] or "nbtrain"


def _write_private(path: Path, text: str) -> None:
    """Nobody else can read it at any time."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
