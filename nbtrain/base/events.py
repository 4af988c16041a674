"""What a rank may tell the notebook while it runs: a closed set of events, which views consume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nbtrain.base.quick_pickle import quickly_pickled


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    rank: int
    time: float
    """seconds since the epoch, on the rank"""


@quickly_pickled
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
class WidgetMessage:
    """What a widget says to its half on the page, in Jupyter's own words."""

    kind: str
    """`comm_open`, `comm_msg`, `comm_close`"""
    model: str
    """the widget's id"""
    data: Mapping[str, Any]
    buffers: tuple[bytes, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Widgets(Event):
    """What widgets of a rank have said since the last such event, in order."""

    messages: Sequence[WidgetMessage]


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class Metrics(Event):
    """What the user's own `log(loss=...)` has said since the last such event."""

    points: Mapping[str, Sequence[tuple[int, float]]]
    """name → (step, value), in order"""


@quickly_pickled
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


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class Use(Event):
    """How busy the rank is, lately."""

    processor: float
    """cores that its process keeps busy"""
    card: float | None = None
    """of its GPU, 0 to 1; None without a GPU, or where its driver does not say"""


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class Throughput(Event):
    """Totals since the cell began; a view divides by time."""

    steps: int
    samples: float
    """of those that several ranks see together its part, so that the sum over the ranks counts each once"""
    seconds: float
    operations: float = 0.0
    """of floating point, as far as they could be counted; 0: not known"""
    fastest: float = 0.0
    """operations a second that the device can do at most; 0: not known"""


PHASES = ("data", "forward", "backward", "communication", "optimizer", "rest")
"""What a step is made of. `data`: waiting for the next batch. `communication`: waiting for other ranks, which is not in
the others. `rest`: what the cell does besides."""


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class Phases(Event):
    """Seconds spent in each of PHASES since the cell began, and what the rank is in now."""

    steps: int
    seconds: tuple[float, ...]
    """one for each of PHASES"""
    now: str = ""
    """one of PHASES; empty before the first batch, or where phases cannot be told apart"""
    within: str = ""
    """the collective that it waits in, in words: `in all_reduce of 1,024`"""


VALIDATION = "validation"
"""the stage of a loader that a training evaluates with"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress(Event):
    """Where the rank stands in the loader it iterates. `total` None: its length is not known."""

    done: int
    total: int | None
    epoch: int
    epochs: int | None = None
    """how many there will be, where a Trainer or the loop around says so"""
    stage: str = ""
    """what the loader is for, if not for training: validation, test, predict"""


RESULT = "nbtrain_result"
"""the name of what a function that was called on all ranks has returned: rank 0's is asked for"""
SCRIPT = "nbtrain_run_script"
"""the name under which a cell that runs a script calls it"""
WHOLE = " (all of it)"
"""at the end of a name of `Finished.replica_checksums`: a number for all tensors of a component, as they were when
their rank looked at them last"""
ORDER = "the order of batches (some ranks only iterated a loader, or drew random numbers before their first batch)"
"""a name in `Finished.replica_checksums`: of a number for the random states"""
GROUP = ".param_groups["
"""in a name of `Finished.replica_checksums`: it is a number of an optimizer, not a tensor"""


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class RankState(Event):
    """`starting`, `ready`, `preparing`, `running`."""

    state: str
    notes: tuple[str, ...] = ()
    """with `running`: parts of the run's first line, `batch 32 × 4 = 128`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Event):
    """The cell raised on this rank."""

    name: str
    """the exception's class, `ValueError`"""
    text: str
    """its message"""
    lines: tuple[str, ...]
    """the traceback as IPython shows it; empty for a rank that was interrupted"""
    exception: bytes | None = None
    """pickled, when it can be"""
    frames: tuple[tuple[str, int, str], ...] = ()
    """of a rank that was interrupted: file, line and function, the innermost call first"""
    interrupted: bool = False
    """nbtrain interrupted it: it was stopped, or waited for one that failed"""
    relayed: bool = False
    """another rank's code raised it, and this rank was told"""
    steps: int = 0
    """steps that it has taken"""
    calls: int = 0
    """how often an optimizer has stepped"""
    entered: int = 0
    """collectives that it has entered"""
    between: bool = False
    """it was stopped between two steps"""
    grouped: bool = True
    """as with `Finished`"""
    pieces: bool = False
    """it keeps only a part of some model"""
    whole: bool = False
    """no optimizer step was cut short: its state is the one after so many calls"""
    card_lost: bool = False
    """CUDA lets the process compute no more, nor read what it has on the card"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried(Event):
    """What a trial has measured on this rank."""

    memory: int
    """peak bytes of its card or process, above what it had before"""
    steps: int
    """timed steps"""
    seconds: float
    """seconds of the timed steps"""
    median: float
    """median seconds of one step"""
    samples: int
    """samples that its loaders gave meanwhile"""
    batch: int
    """samples in a batch; 0: it has no loader"""
    grown: bool = True
    """a loader's batch could be made larger, if that was asked for"""


@quickly_pickled
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
    """from the lead rank: the notebook's random states after the cell"""
    replica_checksums: Any = None
    """checksums of what should be equal on every rank"""
    values: Any = None
    """checksums of what each name holds, of which the notebook gets the lead's"""
    edited: Sequence[tuple[int, int]] = ()
    """(key, number) of each known object that the cell has edited on this rank, but for weights"""
    compared: Mapping[str, int] = field(default_factory=dict)
    """name → a number for what the cell has done; the report compares those of all ranks"""
    released: tuple[int, ...] = ()
    """shared memory that this rank does not use any more"""
    grouped: bool = True
    """the process group is as it was; a cell may have destroyed it"""
    notes: tuple[str, ...] = ()
    """sentences for the user"""
    advice: Mapping[str, str] = field(default_factory=dict)
    """name → sentence to say once in a notebook"""
    tried: Tried | None = None
    """of a trial, which brings nothing home"""
    gradients: tuple[int, ...] = ()
    """keys of tensors that have one on this rank, which waits there for a later cell"""
    lost_gradients: tuple[int, ...] = ()
    """of those that `RunCell` has named: whose were neither cleared nor missed"""
    place: tuple[bytes | None, bool] = (None, False)
    """of an elastic run: where its loops were after the last step, pickled, and whether what stands below that step in
    the loop's body was left"""
    resumed: bool = False
    """its loops have gone on from where the notebook's last load has them begin"""
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
    """What comes home, packed again."""

    home: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugPrompt(Event):
    """The rank's debugger asks for a line, and goes on once a `Typed` has come."""

    text: str
    """what it shows above the prompt"""
    prompt: str
    place: tuple[str, int, int] | None = None
    """of a breakpoint that was just reached: file, line, and how many collectives the rank has entered until there"""


@dataclass(frozen=True, slots=True)
class FrameLocals:
    """What one call of the user's code holds."""

    filename: str
    line: int
    function: str
    values: tuple[tuple[str, str], ...]
    """names, and what they hold in short"""
    more: int = 0
    """names that are not told"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLocals(Event):
    """The locals of a rank in the middle of a cell, which were asked for on the board."""

    asked: int
    """number of the request"""
    frames: tuple[FrameLocals, ...] = ()
    """innermost first"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled(Event):
    """What torch's profiler has found on this rank."""

    steps: int
    path: str = ""
    """of its trace; empty: it has not begun"""
    seconds: float = 0.0
    """that were profiled"""
    waited: float = 0.0
    """of these, for other ranks"""
    operators: tuple[tuple[str, int, float, float], ...] = ()
    """name, calls, and milliseconds of the processor and of the device without what it calls; the dearest first"""


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugLeft(Event):
    """The rank's debugger asks no more."""

    text: str = ""
    """why it never asked"""
    quits: bool = False
    """the user ends the cell: the rank waits for a `Typed` meanwhile"""


class Sink(Protocol):
    """Receives the events of a run. All calls come from the one thread that watches it."""

    def opened(self, summary: str) -> None:
        """The run begins; `summary` is its first line (`ddp · 4 ranks · cpu · batch 32 × 4 = 128`)."""

    def receive(self, event: Event) -> None:
        """One event of one rank. Output and displays do not come here; they are relayed as they are."""

    def tick(self, now: float) -> None:
        """Called about ten times a second."""

    def closed(self, ok: bool, text: str = "", *, killed: bool = False) -> None:
        """The run ended. `text`: what went wrong after its ranks had done the cell. `killed`: the user has ended
        them."""
