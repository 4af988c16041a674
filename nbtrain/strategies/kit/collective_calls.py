"""What all ranks do together where a model is divided: its groups, and what a rank is told that comes alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nbtrain.errors import NotSupported

MESH = "mesh_nbtrain"
"""How descriptions of process groups begin into which a strategy divides all ranks: torch makes them of the names of a
mesh's dimensions, so those begin with `nbtrain`. A collective in one of them is met by every rank, each in its own."""

MEETING = 7
"""Numbers in a reduction by which ranks only meet: as many as no cell is likely to reduce by itself at that place."""

ALONE = (
    "Under fsdp, and deepspeed with --stage 3, a forward gathers weights from all ranks: evaluate on every rank (each "
    "sees its share; reduce brings the results together), and in place of leaving a backward out write "
    "`(loss * 0).backward()`. Under --strategy ddp a rank may run a forward alone"
)


def needs_all_ranks(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` needs every rank: a rank that comes alone is told what to write."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except NotSupported as error:
            if ALONE in str(error):
                raise
            raise NotSupported(f"{error}. {ALONE}") from None

    return called
