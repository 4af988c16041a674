"""A checkpoint opened by all ranks together: read by each of them, or by one for all where it is held in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nbtrain.errors import NbtrainError
from nbtrain.training.checkpoints import find_source as sources
from nbtrain.training.checkpoints import folder
from nbtrain.training.checkpoints import other_formats as foreign
from nbtrain.training.checkpoints.find_source import Source
from nbtrain.training.checkpoints.rank_parts import Described
from nbtrain.training.ranks import collectives

SLOW = 2.0


def agree(check: Callable[[], Any]) -> None:
    """Raises on every rank what it raises on any. Collective."""
    error: NbtrainError | None = None
    try:
        check()
    except NbtrainError as found:
        error = found
    if collectives.connected():
        error = error or next((one for one in collectives.gather(error) if one is not None), None)
    if error is not None:
        raise error


def together(path: Path, say: Callable[[str], None]) -> Source:
    """What this path means to rank 0, on every rank."""
    several = collectives.connected()
    lead = not several or dist.get_rank() == 0
    found: list[Any] = [None, ""]

    def find() -> None:
        if lead:
            found[:] = sources.find(path)

    agree(find)
    if several:
        dist.broadcast_object_list(found, 0)
    where, sentence = found
    if sentence:
        say(sentence)
    opened: list[Source] = []
    alone = several and folder.marker(where) is None and foreign.is_deepspeed(where)
    agree(lambda: opened.append(sources.open_source(where)) if lead or not alone else None)
    if alone:
        outline: list[Any] = [(one.tree, dict(one.described)) for one in opened] or [None]
        dist.broadcast_object_list(outline, 0)
        if not opened:
            tree, described = outline[0]
            opened.append(Source(where, tree, described, lambda key: torch.empty(0), costly=True))
    return opened[0]


def reading(source: Source, say: Callable[[str], None]) -> Callable[[str], torch.Tensor]:
    """Reads, and says how far it is when that takes long. Collective where only one rank has it."""
    several = collectives.connected()
    lead = not several or dist.get_rank() == 0
    began, said, done = time.monotonic(), SLOW, 0
    every = sum(one.nbytes for one in source.described.values())

    def read(key: str) -> torch.Tensor:
        nonlocal said, done
        content = source.read(key) if lead or not source.costly else None
        if source.costly and several:
            content = _passed_on(content, source.described[key])
        assert content is not None
        done += content.nbytes
        if (since := time.monotonic() - began) > said:
            said = since + 5
            say(f"loading {source.path.name}: {done / 2**20:,.0f} of {every / 2**20:,.0f} MB")
        return content

    return read


def _passed_on(content: torch.Tensor | None, described: Described) -> torch.Tensor:
    """Rank 0's, on every rank."""
    if content is None:
        content = torch.empty(described.shape, dtype=described.dtype)
    wire = content.contiguous().reshape(-1).view(torch.uint8)
    sent = wire.to(collectives.on_the_wire(wire))
    dist.broadcast(sent, 0)
    return sent.cpu().view(described.dtype).reshape(described.shape)
