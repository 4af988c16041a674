"""What a rank does for a debugger: stops at breakpoints, and keeps the frames of a cell that failed.

A stop asks the notebook for lines: `DebugPrompt` goes up, `Typed` comes down. Nothing of it is done, or imported,
before a cell stops or fails.
"""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from nbtrain.base.errors import UsageError
from nbtrain.base.events import DebugLeft, DebugPrompt, RankLocals
from nbtrain.base.messages import RunCell, Typed
from nbtrain.base.specs import RankInfo
from nbtrain.compat import kernel
from nbtrain.compat.intercept import Listeners
from nbtrain.worker.loop.shared_board import OPEN, RAISED, STOP, Board
from nbtrain.worker.process.rank_channel import Link
from nbtrain.worker.shell.output import Outputs
from nbtrain.worker.shell.shell import RankShell

if TYPE_CHECKING:
    from nbtrain.worker.debugging.rank_pdb import RankPdb

NOTHING = "nothing to debug on rank {}: its last cell raised nothing"
IN_BACKGROUND = "breakpoint() needs somebody who types: leave --background out"
IN_A_CHILD = "breakpoint() in a process that the rank has started: nobody can type there (num_workers=0 avoids that)"
LOOK = 0.2
"""Seconds between two looks for an interrupt, which only the main thread hears."""


class RankDebugging:
    """One per rank."""

    def __init__(
        self,
        info: RankInfo,
        shell: RankShell,
        link: Link,
        outputs: Outputs,
        board: Board,
        running: Callable[[], tuple[RunCell, int] | None],
    ) -> None:
        """`running`: the cell that runs, and how many collectives it has entered."""
        self.failed: FailedFrames | None = None
        self._rank, self._ranks = info.rank, info.world_size
        self._shell = shell
        self._outputs = outputs
        self._send = link.send
        self._receive = link.wait
        self._board = board
        self._running = running
        self._pid = os.getpid()
        self.debugger: RankPdb | None = None
        """of the cell that runs"""
        self._muted = 0
        """the run in which nothing stops any more"""
        self._listeners = Listeners()

    # -- breakpoints -----------------------------------------------------------------------

    def listen(self) -> None:
        """Take the place of other debuggers where they stop, which know neither of ranks nor of the notebook."""
        self._listeners.listen("bdb.Bdb.set_trace", "breakpoints", lambda old: self.stop)

    def stop(self, *_: object, **__: object) -> None:
        """In place of `breakpoint` and the like: talk with the notebook, here and now."""
        from nbtrain.worker.debugging.rank_pdb import RankPdb, user_frame

        if os.getpid() != self._pid:
            raise UsageError(IN_A_CHILD)
        running, frame = self._running(), user_frame(inspect.currentframe())
        if running is None or frame is None or self._board.parts[self._rank][OPEN] != running[0].number:
            return  # a thread that has outlived its cell
        run, entered = running
        if run.spec.background:
            raise UsageError(IN_BACKGROUND)
        if run.spec.trial is not None or self._muted == run.number:
            return
        if self.debugger is not None and self.debugger.talks:
            return  # an expression at the prompt comes here, or another thread
        place = frame.f_code.co_filename, frame.f_lineno, entered
        lines = TypedLines(self._ask, lambda: self._is_told_to_end(run.number), place)
        if self.debugger is None:
            numbers = kernel.cell_names(self._shell) or {}
            self.debugger = RankPdb(self._rank, lines, self._shell.user_global_ns, numbers, self._talked)
        self.debugger.stdin = self.debugger.stdout = lines  # type: ignore[assignment]  # it has of a file what pdb uses
        self.debugger.stop_at(frame)

    def end_cell(self) -> None:
        """The cell is over: trace nothing more."""
        debugger, self.debugger = self.debugger, None
        if debugger is not None:
            debugger.end()

    def _talked(self, debugger: RankPdb) -> None:
        """The user has told the cell to go on, or to end."""
        lines: Any = debugger.stdin
        if lines.interrupted:
            raise KeyboardInterrupt
        if lines.muted and (running := self._running()) is not None:
            self._muted = running[0].number
        if debugger.quits and not lines.told:
            self._leave(quits=True)
            self._receive(None)  # until the notebook has stopped all ranks: no line of the cell runs meanwhile
        elif debugger.goes_on and not lines.told:
            self._leave()
        debugger.quits = False

    def _is_told_to_end(self, number: int) -> bool:
        return bool(self._board.parts[self._rank][RAISED] == number)

    def looking_for_nan(self, *cell: Any) -> tuple[BaseException | None, list[str]]:
        """`shell.run` under `--detect-anomaly`."""
        from nbtrain.worker.debugging.anomalies import detected_anomalies

        with detected_anomalies(lambda: kernel.cell_names(self._shell) or {}):
            return self._shell.run(*cell)

    # -- after a failure -------------------------------------------------------------------

    def keep(self, error: BaseException, number: int) -> None:
        """Keep what this run has raised, until the next cell. Not what Stop has ended."""
        if error.__traceback__ is not None and self._board.head[STOP] != number:
            self.failed = FailedFrames(error, self._shell.user_global_ns)

    def release(self, only_if_full: bool = False) -> None:
        """Let go of the frames. `only_if_full`: if memory ran out, which what they hold would cost."""
        if self.failed is not None and (self.failed.ran_out or not only_if_full):
            self.failed = None

    def post_mortem(self) -> None:
        """Talk about the frames that were kept."""
        if self.failed is None:
            self._leave(NOTHING.format(self._rank))
            return
        from nbtrain.worker.debugging.rank_pdb import RankPdb
        from nbtrain.worker.ranks.collective_guard import only

        lines = TypedLines(self._ask, lambda: False, None)
        numbers = kernel.cell_names(self._shell) or {}
        debugger = RankPdb(self._rank, lines, self._shell.user_global_ns, numbers)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # an expression may take too long
        try:
            with only((self._rank,), self._ranks), self.failed.names_as_then():
                debugger.reset()
                debugger.interaction(None, self.failed.trace)
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGINT, before)
            debugger.end()
        self._leave()

    def tell_locals(self, asked: int) -> None:
        """Called in the meters' thread, while the main one runs a cell."""
        from nbtrain.worker.debugging.frame_locals import main_thread_locals

        frames = main_thread_locals(self._shell.user_global_ns)
        self._send(RankLocals(rank=self._rank, time=time.time(), asked=asked, frames=frames))

    # -- talking ---------------------------------------------------------------------------

    def _ask(self, text: str, prompt: str, place: tuple[str, int, int] | None, seconds: float) -> Typed | None:
        """Show the text and ask for a line; without `prompt` go on waiting for one that was asked for."""
        if prompt:
            self._outputs.drain()
            self._outputs.outlet.flush()
            self._outputs.outlet.announce()
            self._send(DebugPrompt(rank=self._rank, time=time.time(), text=text, prompt=prompt, place=place))
        message = self._receive(seconds)
        return message if isinstance(message, Typed) else None

    def _leave(self, text: str = "", *, quits: bool = False) -> None:
        self._send(DebugLeft(rank=self._rank, time=time.time(), text=text, quits=quits))


Ask = Callable[[str, str, "tuple[str, int, int] | None", float], "Typed | None"]


class TypedLines:
    """The debugger's stdout and stdin: what it writes goes with its next question, whose answer it reads."""

    def __init__(self, ask: Ask, ends: Callable[[], bool], place: tuple[str, int, int] | None) -> None:
        """`ends`: whether the cell was interrupted. `place`: of the breakpoint: file, line, and how many collectives
        this rank has entered."""
        self._ask = ask
        self._ends = ends
        self._place = place
        self._text = ""
        self.told = self.muted = self.interrupted = False

    def write(self, text: str) -> int:
        self._text += text
        return len(text)

    def flush(self) -> None:
        """All is shown with the next question."""

    def readline(self) -> str:
        """The line that the user has typed. Empty: the debugger is to leave."""
        above, _, prompt = self._text.rpartition("\n")
        self._text = ""
        try:
            if self._ends():
                raise KeyboardInterrupt
            typed = self._ask(above and above + "\n", prompt or " ", self._place, LOOK)
            while typed is None:
                if self._ends():
                    raise KeyboardInterrupt
                typed = self._ask("", "", None, LOOK)
        except KeyboardInterrupt:
            self.told = self.interrupted = True
            return ""
        self._place = None
        self.told, self.muted = typed.text is None, typed.mute
        return "" if typed.text is None else typed.text + "\n"


class FailedFrames:
    """The traceback of a failed cell, and its names. Of the calls around the cell nothing is kept."""

    def __init__(self, error: BaseException, own: dict[str, Any]) -> None:
        """`own`: the globals of the user's cells."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals is not own:
            trace = trace.tb_next
        self.trace = trace or error.__traceback__
        self._own, self._names = own, dict(own)
        self.ran_out = type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError)

    @contextmanager
    def names_as_then(self) -> Iterator[None]:
        """Inside, the cell's own names hold what they held when it failed; since then the notebook has had them
        dropped. What is assigned inside is not kept."""
        own, before = self._own, dict(self._own)
        own.update(self._names)
        try:
            yield
        finally:
            for name in own.keys() - before.keys():
                del own[name]
            own.update(before)

    def clear_callers(self) -> None:
        """Clear the calls in which the cell ran, once they have returned: they hold what was sent with it."""
        frame = self.trace.tb_frame.f_back if self.trace is not None else None
        while frame is not None:
            with suppress(RuntimeError):  # it still runs
                frame.clear()
            frame = frame.f_back
