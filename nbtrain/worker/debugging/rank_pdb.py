"""pdb on a rank. It stops in the user's code and libraries, and shows neither nbtrain's nor IPython's calls."""

from __future__ import annotations

import os
import pdb
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import IPython

HIDDEN = f"{Path(__file__).resolve().parents[2]}{os.sep}", f"{Path(IPython.__file__).resolve().parent}{os.sep}"
"""Calls in these folders are not shown, and `step` does not go through them."""
LIBRARIES = ("<frozen", f"{sysconfig.get_paths()['stdlib']}{os.sep}")
MODULE = "<module>"
BEGIN = ("set_trace", "breakpoint")
"""names of functions that begin to debug: pdb's, IPython's, ipdb's, torch.distributed's"""
ON = -1
"""what bdb sets as `stoplineno` for `continue`"""


class Lines(Protocol):
    """Where a debugger writes, and from where it reads a line. An empty line without an end means: leave."""

    def write(self, text: str) -> int: ...

    def flush(self) -> None: ...

    def readline(self) -> str: ...


class RankPdb(pdb.Pdb):
    """The debugger of one stop, from a breakpoint until the user lets the cell go on, or of one post-mortem."""

    def __init__(
        self,
        rank: int,
        lines: Lines,
        own: dict[str, Any],
        numbers: Mapping[str, int],
        talked: Callable[[RankPdb], None] = lambda _: None,
    ) -> None:
        """`own`: the globals of the user's cells. `numbers`: file names of cells → their numbers. `talked` is called
        whenever the user has told it to go on; what it raises is raised in the user's code."""
        # it has of a file what pdb uses
        super().__init__(stdin=lines, stdout=lines, nosigint=True, readrc=False)  # type: ignore[arg-type]
        self.prompt = f"(Pdb, rank {rank}) "
        self.quits = False
        """the user typed `q`, or the notebook has told it to leave"""
        self.talks = False
        self._own = own
        self._numbers = numbers
        self._talked = talked

    @property
    def goes_on(self) -> bool:
        """Whether the user wants no further stop."""
        return bool(self.stoplineno == ON and not self.breaks)

    def stop_at(self, frame: FrameType) -> None:
        """Talk at once, at the line of `breakpoint()` itself: a cell's last line has none that follows."""
        sys.settrace(None)
        self.reset()
        caller: FrameType | None = frame
        while caller is not None:
            caller.f_trace = self.trace_dispatch
            self.botframe = caller
            caller = caller.f_back
        self.interaction(frame, None)
        if not self.goes_on:
            sys.settrace(self.trace_dispatch)

    def end(self) -> None:
        """Trace nothing more, and hold no frames."""
        sys.settrace(None)
        self.clear_all_breaks()
        self.reset()
        self.forget()
        self.curframe_locals: Any = {}

    # -- what pdb calls --------------------------------------------------------------------

    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        self.talks = True
        try:
            super().interaction(frame, tb_or_exc)
        finally:
            self.talks = False
        self._talked(self)

    def stop_here(self, frame: FrameType) -> bool:
        return bool(super().stop_here(frame)) and not is_hidden(frame) and self._is_reached(frame)

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        if frame.f_code.co_name != MODULE:  # the first line of a statement of the cell follows
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """IPython runs each statement of a cell as a module of its own: the next one is the next line."""
        if frame.f_code.co_name == MODULE:
            self.set_step()
        else:
            super().user_return(frame, return_value)

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        stack, index = super().get_stack(f, t)
        first = next((at for at, (frame, _) in enumerate(stack) if frame.f_globals is self._own), 0)
        shown = [at for at in range(first, len(stack)) if not is_hidden(stack[at][0])]
        if not shown:
            return stack, index
        return [stack[at] for at in shown], max(0, sum(at <= index for at in shown) - 1)

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """`Cell In[3](2)f()` in place of the name of a file that nobody knows."""
        entry = super().format_stack_entry(frame_lineno, lprefix)
        filename = frame_lineno[0].f_code.co_filename
        number = self._numbers.get(filename)
        return entry if number is None else entry.replace(self.canonic(filename), f"Cell In[{number}]", 1)

    def _is_reached(self, frame: FrameType) -> bool:
        """Whether this is the user's code, or called by it and not by nbtrain's or IPython's."""
        at: FrameType | None = frame
        while at is not None:
            if at.f_globals is self._own or not is_library(at.f_code.co_filename):
                return not is_hidden(at)
            if is_hidden(at):
                return False
            at = at.f_back
        return False

    # -- commands --------------------------------------------------------------------------

    def do_quit(self, arg: str) -> bool:
        """q(uit)\nEnd the cell as Stop does."""
        self.quits = True
        self.clear_all_breaks()
        self.set_continue()
        return True

    do_q = do_exit = do_quit

    def do_EOF(self, arg: str) -> bool:
        """EOF\nThe same as quit."""
        return self.do_quit(arg)

    def do_run(self, arg: str) -> None:
        """run\nNot on a rank."""
        self.error("a cell is not started anew from here: leave with q and run it again")

    do_restart = do_run

    def do_interact(self, arg: str) -> None:
        """interact\nNot on a rank."""
        self.error("there is no interpreter in here: type expressions and statements, one a line")


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost call that is not nbtrain's or a debugger's own."""
    while frame is not None and (is_hidden(frame) or frame.f_code.co_name in BEGIN):
        frame = frame.f_back
    return frame


def is_hidden(frame: FrameType) -> bool:
    """Whether this is a call of nbtrain's or IPython's own."""
    return frame.f_code.co_filename.startswith(HIDDEN)


def is_library(filename: str) -> bool:
    """Whether this is Python's own file, or one of an installed package."""
    return filename.startswith(LIBRARIES) or "-packages" + os.sep in filename
