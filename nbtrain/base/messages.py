"""What the kernel may send a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbtrain.base.quick_pickle import quickly_pickled
from nbtrain.base.specs import RunSpec


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class CellSource:
    """The text of one notebook cell, so that tracebacks and `inspect` on a rank show its lines."""

    filename: str
    text: str
    number: int | None


LATELY = 128
"""Cell texts sent last that a rank keeps. It drops older ones, unless a function of that cell lives."""


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class KernelEnvironment:
    """What a rank takes over from the kernel's process before a cell. None: as before."""

    directory: str | None = None
    path: tuple[str, ...] | None = None
    environ: Mapping[str, str] | None = None
    colors: str | None = None
    """of tracebacks, as IPython names them"""
    torch_flags: Mapping[str, Any] | None = None
    settings: Mapping[str, bytes] | None = None
    """of Python and of libraries, each packed: those that have changed"""
    port: int | None = None
    """a free port at which the cell's own code may form a process group"""


@quickly_pickled
@dataclass(frozen=True, kw_only=True, slots=True)
class RunCell:
    """Run a cell."""

    spec: RunSpec
    code: str
    """transformed by IPython, and moved down so that its lines are the notebook's"""
    filename: str
    quiet: bool
    """the cell ends in a semicolon: its last value is not shown"""
    number: int
    """number of the run"""
    sent: float
    """when, by the machine's monotonic clock: interrupts from then on are for this cell"""
    ranks: tuple[int, ...]
    """ranks that run it; the first is the lead, whose changes come home"""
    parcel: Any = None
    """what the ranks do not have yet"""
    drop: tuple[int, ...] = ()
    """keys that the notebook has dropped"""
    unbind: tuple[str, ...] = ()
    """names that the notebook has deleted or assigned something else"""
    released: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """rank → segments of its own that the notebook has let go"""
    random_states: Any = None
    """of the notebook; None: each rank goes on with its own"""
    sources: tuple[CellSource, ...] = ()
    environment: KernelEnvironment = field(default_factory=KernelEnvironment)
    gradients: bool = False
    """an earlier cell has left some on the ranks"""
    notebook_gradients: tuple[int, ...] = ()
    """keys of tensors that have one in the notebook, which does not travel"""
    lost_gradients: tuple[int, ...] = ()
    """keys of tensors whose gradients an earlier cell had left on ranks that have begun anew since"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopt:
    """The lead made new objects and gave them keys: find your own. Answered with `Adopted`."""

    news: tuple[tuple[int, str, Any], ...]
    holders: tuple[int, ...] = ()
    """keys of known objects that hold others than before"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """Send a copy of what you have under this key. Answered with `Pulled`."""

    key: int
    asked: int
    """number of the request: an answer to an earlier one may still be under way"""
    drop: tuple[int, ...] = ()
    """keys that the notebook has dropped"""
    released: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """rank → segments of its own that the notebook has let go"""
    together: bool = False
    """the others are told to `Serve`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serve:
    """Another rank packs something of which each rank may have a piece: give it yours. Not answered."""

    lead: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """To the lead: what you made under this key cannot be made in the notebook; send what comes home once more, with a
    handle in its place. Answered with `Repacked`."""

    key: int
    reason: str
    together: bool = False
    """the others are told to `Serve`"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """Drop every twin and everything prepared: the next cell starts from the notebook."""

    keep: tuple[int, ...] = ()
    """keys of what the notebook has handles for"""
    known: tuple[int, ...] = ()
    """keys of what those may hold: these twins stay, and are sent again before they are used"""
    whole: bool = True
    """no rank was replaced: what is kept in pieces can be put together"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conclude:
    """Pack what the run that failed or was stopped has done so far. Answered with `Finished`."""

    lead: int
    """whose changes come home"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Regroup:
    """Leave the process group and form a new one. Answered with the state `ready`."""

    store: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Debug:
    """Talk about what the last cell has raised. Answered with `DebugPrompt`s, and at last a `DebugLeft`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Typed:
    """The line that a rank's debugger has asked for, also in the middle of a cell."""

    text: str | None
    """None: the debugger is to leave"""
    mute: bool = False
    """stop at no breakpoint of this run any more"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Close:
    """End the process."""


Message = RunCell | Adopt | Pull | Serve | Leave | Forget | Conclude | Regroup | Debug | Typed | Close
