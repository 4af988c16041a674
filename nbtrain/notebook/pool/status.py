"""`%distributed status`: the pool, its ranks, their devices and memory, and what they hold."""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Any

import nbtrain.base.humanize as humanize
import nbtrain.machine.gpus as gpus
import nbtrain.machine.host as host
from nbtrain.engines.base import Pool
from nbtrain.notebook.sync.notebook_side import NotebookSide


def report(pool: Pool | None, side: NotebookSide | None, dead: Container[int] = ()) -> str:
    """`dead`: ranks that the next cell replaces."""
    if pool is None:
        return "no ranks are running; the next distributed cell starts them"
    spec = pool.spec
    nodes = f" in {spec.nodes} nodes" if spec.nodes > 1 else ""
    count = f"{spec.world_size} rank{'s' * (spec.world_size > 1)}{nodes}"
    lines = [f"{count} · {spec.engine}, {spec.start} · {spec.backend}"]
    pids = pool.pids()
    for info in pool.ranks:
        pid = pids.get(info.rank)
        memory = None if pid is None else host.private_memory(pid)
        state = pool.place(info.rank) or "starting"
        if info.rank in dead:
            state = "has died; the next cell replaces it"
        used = f" · {humanize.size(memory)} of its own" if memory is not None else ""
        where = spec.where if spec.together else info.device
        node = f" · node {info.node}" if spec.nodes > 1 else ""
        threads = f"{info.threads} thread{'s' * (info.threads != 1)}"
        lines.append(f"  rank {info.rank}: {where}{node} · {threads} · {state}{used}")
    if spec.machines is not None:
        lines += _machines()
    if spec.kind == "cuda":
        lines += _kernel_holds()
    if side is not None:
        lines.append(_resident(side))
    return "\n".join(lines)


def _machines() -> list[str]:
    """Those that have joined, what went to them and came from them, and who was not let in."""
    from nbtrain.engines.remote.lobby import lobby  # on use: most notebooks stay on one machine

    here = lobby()
    lines = []
    for peer in here.machines():
        sent, received = humanize.size(peer.frames.bytes_sent), humanize.size(peer.frames.bytes_received)
        lines.append(f"  {peer} · {sent} sent · {received} received")
    return [*lines, *(f"  refused: {count} × {why}" for why, count in here.admission.refused.items())]


def _kernel_holds() -> list[str]:
    """GPU memory that the kernel itself holds, and how to give it to the ranks."""
    return [
        f"  the kernel itself holds {humanize.size(user.memory)} of GPU {gpu.index}; "
        "model.cpu() and torch.cuda.empty_cache() give it to the ranks"
        for gpu in gpus.gpus()
        for user in gpu.users
        if user.pid == os.getpid() and user.memory
    ]


def _resident(side: NotebookSide) -> str:
    names = side.names()
    if not names:
        return "  nothing of the notebook's is resident"
    size = sum(_size(node.obj) for node in side.table.nodes.values() if node.kind.name in ("storage", "array"))
    return f"  resident: {', '.join(names)} ({humanize.size(size)} in {len(side.table.nodes):,} objects)"


def _size(obj: Any) -> int:
    size = obj.nbytes
    return int(size() if callable(size) else size)
