"""`--background`: a run that goes on while the notebook is used."""

from __future__ import annotations

import ast
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any

from IPython.core.error import InputRejected

from nbtrain.base.errors import UsageError, text_of
from nbtrain.base.humanize import listed
from nbtrain.base.keyboard_interrupts import presses
from nbtrain.compat import kernel
from nbtrain.exchange.kinds.base import ATOMS
from nbtrain.notebook.background.weight_reads import WeightReads
from nbtrain.notebook.run.cell_run import CellRun
from nbtrain.notebook.sync.notebook_side import MISSING, same

PAUSE = 0.05
NOT_RUN = "KeyboardInterrupt: stopped while it waited for the run in the background; the cell was not run"
UNCHANGING = (*ATOMS, FunctionType, ModuleType, type)


class BackgroundRun:
    """What a `%%distributed --background` cell returns.

    `wait()` blocks until the run is over and its work is in the notebook, and raises what the cell raised. `stop()`
    ends it at the end of a step, with the weights. Without either, its work comes home when the kernel is idle.
    """

    def __init__(self, run: CellRun, at_end: Callable[[BackgroundRun], None]) -> None:
        """`at_end` is called in another thread, once `finish` has something to do."""
        self._going: Going | None = Going(run)
        self._at_end = at_end
        self._observers = run.observers
        number, count = run.cell.number, run.spec.pool.world_size
        cell = f"In [{number}]" if number is not None else "a cell"
        self._name = f"run of {cell}: {run.spec.strategy} on {count} rank{'s' * (count > 1)}"
        self._watched = threading.Event()
        self.error: BaseException | None = None
        self.values: dict[str, Any] = {}
        """name → what the run assigned, where the notebook has meanwhile assigned something else"""

    def __repr__(self) -> str:
        how = "over" if self.over else "running"
        if self.error is not None:
            how = "stopped" if isinstance(self.error, KeyboardInterrupt) else "failed"
        return f"<{self._name}, {self.steps:,} steps, {how}>"

    # -- what the user calls -------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether its work is in the notebook, or it has failed."""
        return self._going is None

    @property
    def steps(self) -> int:
        """Steps that it has reported so far."""
        return self._observers.steps

    @property
    def metrics(self) -> dict[str, list[tuple[float, float]]]:
        """What was logged until now, as (step, value), thinned out in long runs. nbtrain.history() has all values."""
        return self._observers.metrics()

    def wait(self, timeout: float | None = None) -> BackgroundRun:
        """Wait until its work is in the notebook. Stop (■) ends the waiting, not the run."""
        until = None if timeout is None else time.monotonic() + timeout
        here = threading.current_thread() is threading.main_thread()
        while not (self._watched.is_set() if here else self.over):
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"{self!r}")
            self._watched.wait(PAUSE) if here else time.sleep(PAUSE)
        self.finish()
        if self.error is not None and not isinstance(self.error, KeyboardInterrupt):
            raise self.error
        return self

    def stop(self) -> BackgroundRun:
        """End it at the end of a step; what it did until then comes home."""
        if self._going is not None:
            self._going.run.controls.do("stop")
        return self.wait()

    def kill(self) -> None:
        """End its ranks at once; the notebook is as it was."""
        if self._going is not None:
            self._going.run.controls.do("kill")
            self._watched.wait()
            self.finish()

    # -- called by the session -----------------------------------------------------------

    def start(self) -> None:
        assert self._going is not None
        self._going.start(self._watch)

    def _watch(self) -> None:
        assert self._going is not None
        self._going.watch()
        self._watched.set()
        self._at_end(self)

    def leave(self) -> None:
        """The kernel ends, and the run with it."""
        if self._going is not None:
            self._going.run.presses.count = 2
            self._going.run.presses.wake()
            self._watched.wait(1.0)

    def before_cell(self, code: str) -> None:
        """A cell of the notebook is about to run: give it the weights that it reads."""
        if self._going is not None and not self._watched.is_set():
            self._going.reading.provide(code, self._watched.is_set)
        self.finish()

    def finish(self) -> None:
        """Bring its work home once its ranks have ended; called in the main thread. What it raised is in `error`."""
        going = self._going
        if going is None or not self._watched.is_set():
            return
        self._going = None  # releases the notebook's objects
        say = going.run.relay.say
        try:
            going.finish(self.values)
        except BaseException as error:  # also Stop: it is kept, and shown or raised when the run is finished
            self.error = error
            _show(error, going.run)
        else:
            say(f"nbtrain: the run is over, {self.steps:,} steps; what it did is in the notebook")
        if self.values:
            say(
                f"nbtrain: assigned in the notebook while the run went on: {listed(self.values)}. The notebook's are "
                "kept; the run's are in its `values`"
            )
        if overwritten := going.run.home.overwritten:
            say(
                f"nbtrain: changed in the notebook while the run went on, and changed by the run: "
                f"{listed(overwritten)}. The notebook has the run's"
            )


class Going:
    """What a background run holds until it is over."""

    def __init__(self, run: CellRun) -> None:
        self.run = run
        self.reading: WeightReads
        self._failure: BaseException | None = None
        """what was raised while it was watched"""
        self._whole = ExitStack()
        self._conflicts = NameConflicts(run)

    def start(self, watch: Callable[[], None]) -> None:
        run = self.run
        # Its output belongs to this cell, also on kernels that note that in a thread's context.
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(watch,), name="nbtrain-run", daemon=True)
        with ExitStack() as stack:
            stack.enter_context(run.whole())
            with presses(run.once_shown) as run.presses:
                run.begin()
                self.reading = WeightReads(run)
                thread.start()
            self._whole = stack.pop_all()

    def watch(self) -> None:
        try:
            self.run.watch()
        except BaseException as error:  # also Stop: it is kept, and shown or raised when the run is finished
            self._failure = error

    def finish(self, values: dict[str, Any]) -> None:
        run = self.run
        with presses(run.once_shown) as found, self._whole:
            found.count, run.presses = run.presses.count, found
            found.only_count()
            self.reading.put_back()
            if self._failure is not None:
                run.relay.say("nbtrain: the run was discarded; the notebook is as it was before it")
                raise self._failure
            with self._conflicts.kept(values):
                run.finish()


class NameConflicts:
    """Settles names that the notebook assigns while a run may assign or change them, too. Made when the run begins."""

    def __init__(self, run: CellRun) -> None:
        self._run = run
        self._namespace = run.shell.user_ns
        names = dict.fromkeys((*run.names.hard, *run.names.soft, *sorted(run.names.writes)))
        self._before = {name: self._namespace.get(name, MISSING) for name in names}

    @contextmanager
    def kept(self, values: dict[str, Any]) -> Iterator[None]:
        """Inside, the names hold what they held when the run began, so that what comes home finds its place. Afterwards
        they are the notebook's again, and what the run left under them, if it differs, is in `values`."""
        namespace = self._namespace
        theirs = {name: namespace.get(name, MISSING) for name in self._before}
        theirs = {name: value for name, value in theirs.items() if not same(value, self._before[name])}
        for name in theirs:
            _put(namespace, name, self._before[name])
        try:
            yield
        finally:
            for name, value in theirs.items():
                current = namespace.get(name, MISSING)
                if self._run.home.came and self._is_work(name, current) and not same(current, value):
                    values[name] = current
                _put(namespace, name, value)

    def _is_work(self, name: str, current: Any) -> bool:
        """Whether the run has assigned it, or may have changed it in place."""
        if current is MISSING:
            return False
        return not same(current, self._before[name]) or not isinstance(current, UNCHANGING)


def _put(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def _show(error: BaseException, run: CellRun) -> None:
    """Show an error below the cell that started the run, as no cell is there to raise it."""
    if isinstance(error, KeyboardInterrupt):
        run.relay.say(f"nbtrain: {error}")
        return
    render = kernel.renders(error)
    lines = render() if render is not None else [f"{type(error).__name__}: {text_of(error)}"]
    run.relay.screen.write("stderr", "\n".join(lines) + "\n")


def refuse(run: BackgroundRun) -> UsageError:
    """The error for whatever else needs the ranks."""
    return UsageError(
        f"the ranks are in use: {run!r}. Wait for it with run.wait(), or end it with run.stop(), which keeps its work; "
        "run = nbtrain.background() is the run"
    )


class NotRun(InputRejected):
    """Shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class CellRefusal:
    """Keeps a cell from running that IPython has begun with, as an AST transformer that raises: callbacks cannot."""

    def __init__(self, shell: Any) -> None:
        self._transformers: list[Any] = shell.ast_transformers

    def enter(self) -> None:
        """Refuse the cell that is about to run."""
        self._transformers.append(self)

    def leave(self) -> None:
        if self in self._transformers:
            self._transformers.remove(self)

    def visit(self, tree: ast.AST) -> ast.AST:
        self.leave()
        raise NotRun(NOT_RUN)
