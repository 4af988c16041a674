"""What a rank may tell the notebook while it runs: a closed set. Views consume events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    rank: int
    time: float
    """seconds since the epoch, on the rank"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Output(Event):
    """Text that was written to `stdout` or `stderr`, in order."""

    stream: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Display(Event):
    """What `display()`, a figure or a last expression shows. `data` None: clear_output."""

    data: Mapping[str, Any] | None
    metadata: Mapping[str, Any]
    transient: Mapping[str, Any]
    update: bool = False
    wait: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric(Event):
    """What the user's own `log(loss=...)` said."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory(Event):
    """Bytes: the process's private memory, and what torch has allocated and reserved on its device."""

    process: int
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    limit: int = 0
    """what the rank may come to have: its card's memory, or the machine's (the container's); 0: not known"""
    retries: int = 0
    """how often torch's allocator has had to empty its cache and try again: the card is nearly full"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use(Event):
    """How busy the rank is, lately."""

    processor: float
    """of its process: 1.0 is one core"""
    card: float | None = None
    """of its GPU, 0 to 1; None where there is none or its driver does not say"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput(Event):
    """Totals since the cell began; a view divides by time."""

    steps: int
    samples: int
    seconds: float
    operations: float = 0.0
    """of floating point, as far as they could be counted; 0: not known"""
    fastest: float = 0.0
    """so many operations a second the device can do at most; 0: not known"""


PHASES = ("data", "forward", "backward", "communication", "optimizer", "rest")
"""What a step is made of. `data`: waiting for the next batch. `communication`: waiting for other ranks, which is not in
the others. `rest`: what the cell does besides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases(Event):
    """Seconds spent in each of PHASES since the cell began, and what the rank is in now."""

    steps: int
    seconds: tuple[float, ...]
    """one for each of PHASES"""
    now: str = ""
    """one of PHASES; empty before the first batch, or where there is nothing to tell one from another"""
    within: str = ""
    """the collective that it waits in, in words: `in all_reduce of 1,024`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Event):
    """Where the rank stands in the loader it iterates. `total` None: its length is not known."""

    done: int
    total: int | None
    epoch: int


GROUP = ".param_groups["
"""in what `Finished.agreement` names: a number of an optimizer, and no tensor"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState(Event):
    """`starting`, `ready`, `preparing`, `running`."""

    state: str
    notes: tuple[str, ...] = ()
    """with `running`: what belongs into the run's first line, `batch 32 × 4 = 128`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Event):
    """The cell raised on this rank."""

    name: str
    """the exception's class, `ValueError`"""
    text: str
    """its message"""
    lines: tuple[str, ...]
    """the traceback as IPython shows it; of a rank that was interrupted nothing"""
    exception: bytes | None = None
    """pickled, when it can be"""
    frames: tuple[tuple[str, int, str], ...] = ()
    """of one that was: file, line and function, the innermost call first"""
    interrupted: bool = False
    """by us: it was stopped, or waited for one that failed"""
    relayed: bool = False
    """the code of another rank raised it, and this one was told"""
    steps: int = 0
    """how many it has taken"""
    calls: int = 0
    """how often an optimizer has stepped"""
    entered: int = 0
    """how many collectives"""
    between: bool = False
    """it was stopped where nothing was under way"""
    grouped: bool = True
    """as with `Finished`"""
    pieces: bool = False
    """it keeps only a part of some model"""
    whole: bool = False
    """no optimizer was in the middle of it: what is there is the state after so many calls"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried(Event):
    """What a trial has shown of this rank."""

    memory: int
    """bytes at the most, besides what it had before: of its card, or of its process"""
    steps: int
    """that were timed"""
    seconds: float
    """that those took"""
    median: float
    """that one of them took"""
    samples: int
    """that its loaders gave it meanwhile"""
    batch: int
    """samples of a batch; 0: no loader gave it one"""
    grown: bool = True
    """a loader's batch could be made larger, if that was asked for"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Event):
    """The cell ended well on this rank."""

    steps: int
    calls: int = 0
    """how often an optimizer has stepped"""
    waits: bool = False
    """it can bring home what the cell did only together with the others, which is still to be asked for"""
    home: Any = None
    """from the lead rank: what comes home, packed"""
    random_states: Any = None
    """from the lead rank: where the notebook's random streams are to stand"""
    agreement: Any = None
    """checksums of what should be equal on every rank"""
    values: Any = None
    """checksums of what the notebook can have only once"""
    compared: Mapping[str, int] = field(default_factory=dict)
    """numbers of what the cell has done, by name: where all ranks have the same, or not, there is something to say"""
    released: tuple[int, ...] = ()
    """shared memory that nothing on this rank shows any more"""
    grouped: bool = True
    """the process group is as it was; a cell may have destroyed it"""
    notes: tuple[str, ...] = ()
    """sentences for the user"""
    advice: Mapping[str, str] = field(default_factory=dict)
    """sentences that a notebook is told once, by name"""
    tried: Tried | None = None
    """of a trial, which brings nothing home"""
    began: RankState | None = None
    """the `running` of a cell so short that it was not sent by itself"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopted(Event):
    """The rank looked for its own objects under the keys that the lead gave to new ones."""

    lacking: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled(Event):
    """A copy of something that lives on the ranks."""

    asked: int
    parcel: Any = None
    reason: str = ""
    """why there is none"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repacked(Event):
    """What comes home, once more."""

    home: Any


class Sink(Protocol):
    """Who is told of a run. All calls come from the one thread that watches it."""

    def opened(self, summary: str) -> None:
        """The run begins; `summary` is its first line (`ddp · 4 ranks · cpu · batch 32 × 4 = 128`)."""

    def receive(self, event: Event) -> None:
        """One event of one rank. Output and displays do not come here; they are relayed as they are."""

    def tick(self, now: float) -> None:
        """About ten times a second, whether anything happened or not."""

    def closed(self, ok: bool) -> None:
        """The run ended."""
