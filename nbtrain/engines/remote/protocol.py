"""What kernel and nodes say to each other. Each but the first is one numbered frame: a pickle, and bytes of a segment
where there are some. Whoever has the pool's keys may say them, and nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbtrain.base.events import Event
from nbtrain.base.quick_pickle import quickly_pickled
from nbtrain.base.specs import PoolSpec, RankInfo
from nbtrain.engines.base import Death, Frame
from nbtrain.engines.remote.machines import Machine
from nbtrain.engines.remote.same_machine import Proof

BEAT = 0.5
"""Seconds between two signs of life."""
ALERT = 0.01
"""Seconds between two looks at the board while a cell runs."""
ASLEEP = 5.0
"""Seconds without a turn of one's loop after which the machine itself, or the process, has been asleep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """A node's first words: `join_message.py`."""

    machine: Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Admitted:
    """The kernel has a place for it."""

    clock: int
    """its monotonic clock's nanoseconds"""
    prefixes: tuple[str, ...]
    """folders of its Python: what lies in them is installed on each machine by itself"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRanks:
    """Have these ranks. Answered by their events."""

    generation: int
    """number of the pool; what is said of another is late"""
    spec: PoolSpec
    ranks: tuple[RankInfo, ...]
    store: str
    address: str
    """by which the other machines reach this one"""
    master: str
    """by which all of them reach rank 0's"""
    environ: Mapping[str, str]
    """what the notebook has set of its environment"""
    beside: Proof | None = None
    """of the kernel, on whose machine it is: shared memory is opened, and nothing of it is sent"""
    again: bool = False
    """other processes had these ranks before, and the other machines have what they wrote on the board"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegroupRanks:
    """`Pool.regroup` of this machine's part."""

    generation: int
    anew: tuple[int, ...]
    store: str
    environ: Mapping[str, str]


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class Deliver:
    """A message for these ranks, which comes along, pickled once for all machines."""

    generation: int
    ranks: tuple[int, ...]


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentBytes:
    """A stretch of a segment, which comes along. Before the message or the event that needs it."""

    generation: int
    owner: int
    """the rank, or -1: the kernel"""
    number: int
    size: int
    """of the whole segment"""
    offset: int
    original: int
    """tells it from another segment that has had the number before"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupt:
    generation: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AskStacks:
    """Answered with `Stacks`."""

    generation: int
    asked: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KillRanks:
    """Their deaths will be told."""

    generation: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRanks:
    """The pool is over; the machine waits for the next one. Answered with `Processes`, of which there are none."""

    generation: int
    kill: bool
    """without asking them"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """The notebook needs this machine no more."""

    reason: str


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What has happened to this machine's ranks, in order."""

    generation: int
    events: tuple[Event | Death, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """rank → process, of those that live on this machine."""

    generation: int
    pids: Mapping[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    asked: int
    frames: Mapping[int, list[Frame]]


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class BoardWords:
    """What has changed on the board: of a machine's ranks to the kernel, and from there to the other machines."""

    generation: int
    parts: Mapping[int, tuple[bytes, bytes]]
    """rank → places in its part, and the words that stand there now"""
    settled: int = 0
    """the last `BoardHead` that these ranks could see when this was read"""


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class BoardHead:
    """The words that the kernel writes. Urgent: the last one counts."""

    generation: int
    words: bytes
    asked: int = 0
    """to be answered with `BoardWords` once ranks can see it"""
