"""Finds the cell and line that initialise CUDA in the kernel: after that the kernel cannot be forked."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import nbtrain.machine.fork_safety as fork_safety
from nbtrain.compat import cuda, python

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


@dataclass(frozen=True, slots=True)
class Origin:
    """Where CUDA was initialised. `line` None: only the cell is known."""

    cell: int | None
    """its number, known when the cell has ended"""
    line: int | None = None
    source: str = ""
    through: str = ""
    """file and line of the library that did it for the cell"""

    def __str__(self) -> str:
        if self.cell is not None:
            text = f"cell [{self.cell}]"
        else:
            text = "something outside the cells" if self.line is None else "a cell"
        text += f", line {self.line}" if self.line is not None else ""
        text += f": `{self.source}`" if self.source else ""
        return text + (f" (through {self.through})" if self.through else "")


class CudaWatch:
    """Notes the first initialisation of CUDA in this process.

    torch runs what is queued there at the moment it initialises: one queued
    function there sees the stack. It can only be queued once torch is imported, which is looked for
    between cells; for CUDA that wakes in the very cell that imports torch first, and for CUDA that
    another library wakes, the cell is known but not the line. What happened before nbtrain was
    loaded is not known at all. Costs one look at the process's open files per cell.
    """

    def __init__(
        self, shell: InteractiveShell, *, initialised: Callable[[], Any] = fork_safety.cuda_initialised
    ) -> None:
        self.origin: Origin | None = None
        self._shell = shell
        self._initialised = initialised
        self._unnumbered = False
        """the origin is in the running cell, whose number comes with its result"""
        self._torch: Any = None
        """`torch.cuda`, once the function is queued there"""
        self.too_late = initialised() is not None
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)
        self._look(None)

    def close(self) -> None:
        for event, function in (("pre_run_cell", self._before_cell), ("post_run_cell", self._after_cell)):
            self._shell.events.unregister(event, function)
        if self._torch is not None:
            cuda.call_no_more(self._torch, self._note)

    def _before_cell(self, info: Any) -> None:
        self._look(None)
        self._unnumbered = self.origin is None

    def _after_cell(self, result: Any) -> None:
        if self.origin is None:
            self._look(result.execution_count)
        elif self._unnumbered:
            self.origin = replace(self.origin, cell=result.execution_count)
        self._unnumbered = False

    def _look(self, cell: int | None) -> None:
        if self.too_late or self.origin is not None:
            return
        if self._initialised() is not None:
            self.origin = Origin(cell)
            return
        module = getattr(sys.modules.get("torch"), "cuda", None)
        if self._torch is None and module is not None and cuda.call_when_initialised(module, self._note):
            self._torch = module

    def _note(self) -> None:
        """Called by torch, on the stack of whoever needed CUDA."""
        if self.origin is not None:
            return
        frames = list(_stack(python.caller()))
        own = next((frame for frame in reversed(frames) if frame.f_globals is self._shell.user_ns), None)
        if own is None:
            self.origin = Origin(None)
            return
        called = frames[: frames.index(own)]
        foreign = [f for f in called if f.f_globals is not self._shell.user_ns and not _of_torch(f)]
        self.origin = Origin(
            cell=None,
            line=own.f_lineno,
            source=_line(own),
            through=f"{foreign[0].f_code.co_filename}:{foreign[0].f_lineno}" if foreign else "",
        )


_WATCH: list[CudaWatch] = []
"""The watches of this kernel, the newest last."""


def watch_cuda_init(shell: InteractiveShell) -> Callable[[], None]:
    """Begin to watch, when the extension is loaded; call what it returns when the extension is unloaded."""
    watch = CudaWatch(shell)
    _WATCH.append(watch)

    def stop() -> None:
        if watch in _WATCH:
            _WATCH.remove(watch)
            watch.close()

    return stop


def latest() -> CudaWatch | None:
    return _WATCH[-1] if _WATCH else None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _of_torch(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] == "torch" or name.startswith("importlib.") or "<frozen" in frame.f_code.co_filename


def _line(frame: FrameType) -> str:
    import linecache

    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
