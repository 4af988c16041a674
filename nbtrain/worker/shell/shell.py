"""The IPython shell in which a rank runs cells: magics, `!cmd`, `await`, `display`, figures, last expressions."""

from __future__ import annotations

import asyncio
import builtins
import gc
import getpass
import linecache
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from types import FrameType, FunctionType, TracebackType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
from traitlets.config import Config

from nbtrain.base.errors import NbtrainError, UsageError
from nbtrain.base.events import RESULT, SCRIPT
from nbtrain.base.installed_files import is_installed
from nbtrain.base.keyboard_interrupts import uninterrupted
from nbtrain.base.messages import LATELY, CellSource
from nbtrain.compat import kernel, namespaces, python, widgets
from nbtrain.worker.modules.installed_packages import InstalledPackages
from nbtrain.worker.shell.output import Outlet

INLINE = "module://matplotlib_inline.backend_inline"


class _Publisher(DisplayPublisher):
    """`display()` goes to the notebook."""

    shell: Any

    def publish(  # type: ignore[override]  # IPython's takes more by keyword
        self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any
    ) -> None:
        self.shell.outlet.show(data, metadata, transient, update=update)

    def clear_output(self, wait: bool = False) -> None:
        self.shell.outlet.show(None, wait=wait)


class _Hook(DisplayHook):
    """A cell's last expression goes to the notebook."""

    shell: Any

    def __call__(self, result: Any = None) -> None:
        if result is None or self.shell.muted:
            return
        data, metadata = self.shell.display_formatter.format(result)
        if data:
            self.shell.outlet.show(data, metadata)


class CellSources:
    """The texts of cells in `linecache`, for tracebacks. An old one stays while a function defined in it lives."""

    def __init__(self, numbers: dict[str, int] | None) -> None:
        """`numbers`: where IPython looks a cell's number up."""
        self._numbers = numbers
        self._known: dict[str, None] = {}
        """the latest last"""
        self._full = 2 * LATELY
        """number of sources at which old ones are dropped"""

    def learn(self, sources: Iterable[CellSource]) -> None:
        for source in sources:
            lines = source.text.splitlines(keepends=True)
            linecache.cache[source.filename] = (len(source.text), None, lines, source.filename)
            if self._numbers is not None and source.number is not None:
                self._numbers[source.filename] = source.number
            self._known.pop(source.filename, None)
            self._known[source.filename] = None
        if len(self._known) >= self._full:
            self._let_go()
            self._full = 2 * max(LATELY, len(self._known))

    def _let_go(self) -> None:
        alive = {obj.__code__.co_filename for obj in gc.get_objects() if type(obj) is FunctionType}
        for filename in list(self._known)[:-LATELY]:
            if filename not in alive:
                del self._known[filename]
                linecache.cache.pop(filename, None)
                if self._numbers is not None:
                    self._numbers.pop(filename, None)


class RankShell(kernel.ShownErrors):
    """Made before a rank is forked, so that it costs nothing afterwards; `outlet` is given to it in the rank."""

    display_pub_class = _Publisher
    displayhook_class = _Hook
    outlet: Outlet
    packages: InstalledPackages
    texts: CellSources
    _events: asyncio.AbstractEventLoop | None = None
    muted = False
    traceback_lines: list[str]
    worth_showing: Callable[[BaseException | None], bool]
    """asked with what a cell has raised"""
    old_main: Any
    stop_here: Callable[..., None]
    """called in place of `breakpoint`"""

    def init_history(self) -> None:
        super().init_history()
        if self.history_manager is not None:
            self.history_manager.enabled = False

    def init_io(self) -> None:
        """The rank sets up its own streams."""

    def atexit_operations(self) -> None:
        """Nothing to save."""

    def enable_gui(self, gui: str | None = None) -> None:
        """Called by `%matplotlib inline` too; refuses GUI windows, which nobody would see."""
        if gui not in (None, "inline", "agg"):
            raise UsageError(
                f"a rank has no screen for {gui} windows: write %matplotlib inline, figures show in the cell"
            )

    def system_piped(self, cmd: str) -> None:
        from IPython.utils.process import system

        self.user_ns[namespaces.EXIT_CODE] = system(self.var_expand(cmd, depth=1))

    system = system_piped

    def shown_traceback(self, error: BaseException, tb: TracebackType | None) -> TracebackType | None:
        return without_our_call(down_to_user_line(tb) if isinstance(error, NbtrainError) else tb)

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        """Not for interrupts, which the notebook reports: IPython's first traceback takes half a second. Nor does one
        that comes meanwhile take the place of the error: a debugger would ask where a module is imported."""
        error = sys.exc_info()[1]
        if not self.worth_showing(error):
            return
        if isinstance(error, SyntaxError):  # of a script, or of what a cell compiles: its place is all there is to see
            shower: Any = self.SyntaxTB
            self.take_traceback(list(shower.structured_traceback(type(error), error, [])))
        else:
            uninterrupted(partial(super().showtraceback, *args, **kwargs))

    def rehearse(self) -> None:
        """Format one traceback, which imports what all others need."""
        try:
            raise RuntimeError
        except RuntimeError as error:
            self.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)

    def take_traceback(self, lines: list[str]) -> None:
        self.traceback_lines = lines

    def clear_last_error(self) -> None:
        """The last traceback's frames keep the cell's objects alive, loaders' workers too; nobody can ask for it."""
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        self.InteractiveTB.tb = None

    def run(self, code: str, filename: str, muted: bool) -> tuple[BaseException | None, list[str]]:
        """Run a cell that was transformed and moved to its lines; the exception it raised, and how IPython shows it."""
        self.muted = muted
        self.traceback_lines = []
        result = ExecutionResult(ExecutionInfo(code, False, True, False, None))
        with self.builtin_trap, self.display_trap:
            try:
                tree = self.compile.ast_parse(code, filename)
                body = self.transform_ast(tree).body
                running = self.run_ast_nodes(
                    body, filename, interactivity="last_expr", compiler=self.compile, result=result
                )
                self._drive(running, turning="await" in code or "async" in code)
            except (KeyboardInterrupt, Exception) as error:  # raised outside of the user's code, yet the cell's
                result.error_in_exec = error
                self.showtraceback()
            self._flush_figures()
        return result.error_before_exec or result.error_in_exec, self.traceback_lines

    def _drive(self, running: Coroutine[Any, Any, Any], turning: bool) -> None:
        """As in a notebook there is an event loop, so `asyncio.create_task` works; it runs where a cell awaits."""
        if self._events is None:
            self._events = asyncio.new_event_loop()
            asyncio.set_event_loop(self._events)
        if turning:
            task = self._events.create_task(running)
            try:
                self._events.run_until_complete(task)
            finally:
                if not task.done():  # interrupted while all slept: it would go on when a later cell awaits
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        self._events.run_until_complete(task)
            return
        python.set_running_loop(self._events)
        try:
            running.send(None)
        except StopIteration:
            return
        finally:
            python.set_running_loop(None)
        raise RuntimeError("the cell waits for an event loop although it awaits nothing")

    def _flush_figures(self) -> None:
        if "matplotlib.pyplot" not in sys.modules:
            return
        from matplotlib_inline import backend_inline

        backend_inline.flush_figures()


def down_to_user_line(tb: TracebackType | None) -> TracebackType | None:
    """The traceback down to the user's last line, without the frames of nbtrain and other installed files below it."""
    frames = []
    while tb is not None:
        frames.append(tb)
        tb = tb.tb_next
    while len(frames) > 1 and is_installed(frames[-1].tb_frame.f_code.co_filename):
        frames.pop()
    return _chained(frames)


def without_our_call(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without the cell that nbtrain has written to call a function or a script, and without what is
    between it and the user's first line."""
    frames = []
    while tb is not None:
        frames.append(tb)
        tb = tb.tb_next
    start = next((at for at, frame in enumerate(frames) if _is_our_call(frame.tb_frame)), len(frames))
    end = start
    while end < len(frames) and (_is_ours(frames[end].tb_frame) or _is_our_call(frames[end].tb_frame)):
        end += 1
    return _chained([*frames[:start], *frames[end:]])


def _is_ours(frame: FrameType) -> bool:
    module: str = frame.f_globals.get("__name__", "")
    return module == "runpy" or module.startswith("nbtrain.")


def _is_our_call(frame: FrameType) -> bool:
    """`nbtrain_result = train(…)`"""
    own = not {RESULT, SCRIPT}.isdisjoint(frame.f_code.co_names)
    return own and frame.f_globals.get("__name__") == "__main__"


def _chained(frames: list[TracebackType]) -> TracebackType | None:
    tb = None
    for frame in reversed(frames):
        tb = TracebackType(tb, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return tb


def _refuse_input(prompt: object = "", *_: Any, **__: Any) -> str:
    """In place of `input` and `getpass`; debuggers ask through it too."""
    raise UsageError(
        f"a rank has no input, and it asked for {str(prompt).strip()!r}: ask in an ordinary cell and use the answer "
        "here; breakpoint() stops a rank and asks in the notebook"
    )


def make_shell(module: Any = None, *, in_notebook: bool = False) -> RankShell:
    """The one shell of a rank. Its namespace becomes `__main__`, as a kernel's is; or that of `module` is taken.
    `in_notebook`: its widgets can be shown, so libraries that ask draw their progress as they would in the kernel."""
    os.environ["MPLBACKEND"] = INLINE
    builtins.input = getpass.getpass = _refuse_input
    config = Config()
    config.HistoryManager.enabled = False
    if in_notebook:
        widgets.as_in_notebook(config)
    InteractiveShell.clear_instance()
    where = tempfile.gettempdir() if not os.access(os.path.expanduser("~"), os.W_OK) else None
    if where is not None:
        os.environ.setdefault("IPYTHONDIR", os.path.join(where, f"nbtrain-ipython-{os.getuid()}"))
    warnings.filterwarnings("ignore", "To exit: use 'exit'", UserWarning)  # a sys.exit() of the cell's: an exception
    main = sys.modules.get("__main__")
    shell = RankShell.instance(config=config, user_module=module)
    _as_a_script()
    shell.packages = InstalledPackages()
    shell.texts = CellSources(kernel.cell_names(shell))
    sys.breakpointhook = lambda *args, **kwargs: shell.stop_here(*args, **kwargs)
    shell.old_main = main  # its globals would be cleared with it, under code that still runs
    return shell


def _as_a_script() -> None:
    """Libraries that distribute refuse to where they take the process for an interactive one; and what stands in
    `sys.argv` is for this process, not for a script's `parse_args()`."""
    for place, name in ((sys, "ps1"), (sys, "ps2"), (sys, "ps3"), (builtins, "__IPYTHON__")):
        if hasattr(place, name):
            delattr(place, name)
    sys.argv[:] = [""]
