"""A real IPython shell inside the test, and a session that records what it is asked for instead of doing it."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import IPython
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbtrain.base.specs import PoolSpec, RunSpec
from nbtrain.notebook.magics import extension
from nbtrain.strategies.base import Strategy

if TYPE_CHECKING:
    from nbtrain.notebook.cell import Cell


class Halves(Strategy):
    """A strategy of the notebook's own, with an option of each sort."""

    @dataclass(frozen=True, kw_only=True)
    class Options:
        bucket: int = 25
        ratio: float = 0.5
        wrap: frozenset[type] = frozenset()
        mode: Literal["full", "grad"] = "full"
        label: str | None = None
        eager: bool = False


class Recorder:
    """The session's interface; keeps what came in."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.runs: list[tuple[RunSpec, Cell]] = []
        self.calls: list[Any] = []

    def run(self, run: RunSpec, cell: Cell) -> None:
        self.runs.append((run, cell))

    def is_busy(self) -> bool:
        return False

    def start(self, pool: PoolSpec) -> None:
        self.calls.append(pool)

    def stop(self) -> None:
        self.calls.append("stop")

    def restart(self) -> None:
        self.calls.append("restart")

    def status(self) -> str:
        return "all is well"

    def check(self, names: list[str]) -> object:
        self.calls.append(("check", names))
        return names

    def close(self) -> None:
        self.calls.append("close")


class Notebook:
    """Cells run in a shell with the extension loaded."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.recorders: list[Recorder] = []

    def open_session(self, shell: InteractiveShell, on_idle: Callable[[], None]) -> Recorder:
        self.recorders.append(Recorder(shell))
        return self.recorders[-1]

    @property
    def session(self) -> Recorder:
        return self.recorders[-1]

    def run(self, cell: str, **names: Any) -> None:
        """Runs a cell that has to succeed."""
        self.shell.user_ns.update(names)
        result = self.shell.run_cell(cell, store_history=True)
        result.raise_error()

    def spec(self, cell: str, **names: Any) -> RunSpec:
        """What the cell asks the session to run."""
        self.run(cell, **names)
        return self.session.runs[-1][0]

    def cell(self, cell: str) -> Cell:
        self.run(cell)
        return self.session.runs[-1][1]

    def error(self, cell: str, **names: Any) -> BaseException:
        """What a cell raises that has to fail."""
        self.shell.user_ns.update(names)
        error = self.shell.run_cell(cell, store_history=True).error_in_exec
        assert error is not None, f"{cell!r} was expected to fail"
        return error

    def complaint(self, cell: str, **names: Any) -> str:
        """The one line that a cell which cannot be done shows."""
        error = self.error(cell, **names)
        # IPython shows exactly this class without a traceback
        assert type(error) is IPython.core.error.UsageError, repr(error)
        assert "\n" not in str(error)
        return str(error)


@contextmanager
def bare_shell() -> Iterator[InteractiveShell]:
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "NoColor" if IPython.version_info < (9,) else "nocolor"
    shell = InteractiveShell.instance(config=config)  # tracebacks ask the one shell of the process for cell numbers
    try:
        yield shell
    finally:
        extension.unload(shell)
        # what IPython does when its process ends
        atexit.unregister(shell.atexit_operations)
        shell.restore_sys_module_state()
        shell.atexit_operations()
        InteractiveShell.clear_instance()


@contextmanager
def notebook() -> Iterator[Notebook]:
    with bare_shell() as shell:
        found = Notebook(shell)
        extension.load(shell, open_session=found.open_session, doctor=lambda: "in good health")
        yield found


def completions(shell: InteractiveShell, text: str) -> list[str]:
    """What the front end shows for Tab at the `|`, each as the whole word it makes of the line."""
    at = text.index("|")
    text = text.replace("|", "")
    begin = text.rfind(" ", 0, at) + 1
    if IPython.version_info < (8, 6):
        # `completions` would mix in what jedi makes of the line, which a hook cannot prevent
        last = text.rfind("\n", 0, at) + 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PendingDeprecationWarning)
            fragment, matches = shell.complete("", text[last:].split("\n")[0], at - last)
        return sorted({text[begin : at - len(fragment)] + one for one in matches})
    with provisionalcompleter():
        found = list(shell.Completer.completions(text, at))
    return sorted({text[begin : one.start] + one.text for one in found})
