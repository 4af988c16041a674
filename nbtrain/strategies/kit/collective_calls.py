"""What all ranks do together where a model is divided: its groups, what a collective is for, and what a rank is told
that comes alone."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nbtrain.base.errors import NotSupported

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
OTHER_LAYERS = (
    "under fsdp they gather every layer together (does the model skip layers at random, or choose experts or a branch "
    "for each batch?). --strategy ddp can do that"
)

OWN_NUMBERS = (
    "the ranks wrote different numbers to weights, gradients or states in pieces (p.grad.mul_(c), a learning rate, the "
    "limit of a clipping, a state dict), or one wrote alone, or set gradients to None (optimizer.zero_grad() below `if "
    "rank == 0:`), and each rank keeps its part of one tensor. Write on every rank, and give all ranks the same: "
    "reduce(c)"
)

OTHER_TENSORS = (
    "under fsdp, and deepspeed with --stage 3, a tensor in pieces is read by all ranks together, each with its part: "
    "read the same one on every rank, chosen by what all ranks know (reduce(value)), and compute with a rank's own "
    "numbers after `float(…)`, or with their mean: reduce(number). --strategy ddp can read others"
)

subject = [0]
"""What the next collective is for: the number of a component or a unit, which ranks compare. 0: it is not said."""
_subjects: dict[int, str] = {}
_weights: set[int] = set()
"""subjects that are one weight each"""


def subject_of(name: str) -> int:
    """The number of what has this name on all ranks."""
    number = zlib.crc32(name.encode()) or 1
    _subjects[number] = name
    return number


def subject_of_weight(name: str) -> int:
    _weights.add(number := subject_of(name))
    return number


def is_weight(number: int) -> bool:
    return number in _weights


WHOLE = subject_of("`with whole(…)`")
"""of what puts tensors together for a block of the user's"""


@contextmanager
def told(about: int) -> Iterator[None]:
    """What is sent meanwhile is for this."""
    before, subject[0] = subject[0], about or subject[0]
    try:
        yield
    finally:
        subject[0] = before


def subject_name(number: int) -> str:
    return _subjects.get(number, "another one")


def needs_all_ranks(function: Callable[..., Any], about: int) -> Callable[..., Any]:
    """`function` needs every rank, with the same subject: a rank that comes alone is told what to write."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        before, subject[0] = subject[0], about
        try:
            return function(*args, **kwargs)
        except NotSupported as error:
            if any(said in str(error) for said in (ALONE, OTHER_LAYERS, OWN_NUMBERS)):
                raise
            raise NotSupported(f"{error}. {ALONE}") from None
        finally:
            subject[0] = before

    return called
