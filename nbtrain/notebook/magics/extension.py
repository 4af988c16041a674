"""The magics: registered when the extension is loaded, removed when it is unloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError as OneLine
from IPython.core.magic import no_var_expand

from nbtrain.base.errors import IN_FULL, NbtrainError, UsageError
from nbtrain.compat import kernel
from nbtrain.notebook import annexes
from nbtrain.notebook.magics import (
    cells,
    completion,
    debug_verb,
    manual,
    verbs,
)
from nbtrain.notebook.magics.line.options import BY_NAME
from nbtrain.notebook.magics.line.parse import Request, instead, parse_ranks
from nbtrain.notebook.magics.line.resolve import check_flags
from nbtrain.notebook.magics.state import MagicsState, OpenSession

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from nbtrain.notebook.session import Session

_LOADED: dict[InteractiveShell, Extension] = {}

ASK = ("--help", "-h")
"""What people type who look for the manual."""
INSTEAD = {"distributed": "nbtrain", "rank": "nbtrain_rank"}
"""magic → its name where another extension already has the first"""


def load(shell: InteractiveShell, *, doctor: Callable[[], str], open_session: OpenSession | None = None) -> None:
    """`doctor` returns the report of `%distributed doctor`; `open_session` makes the session that runs the cells."""
    if shell not in _LOADED:
        kernel.reply_through_stream(getattr(shell, "kernel", None))
        _LOADED[shell] = Extension(shell, MagicsState(shell, open_session or _open_session, doctor))


def unload(shell: InteractiveShell) -> None:
    extension = _LOADED.pop(shell, None)
    if extension is not None:
        extension.close()


def session_here() -> Session:
    """The session of the notebook that calls."""
    state = state_here()
    if state is None:
        raise UsageError("nbtrain is not loaded here; %load_ext nbtrain loads it")
    return state.opened()


def state_here() -> MagicsState | None:
    """The state of the magics of the notebook that calls. None: they are not loaded there."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    extension = _LOADED.get(shell) if shell is not None else None
    return extension.state if extension is not None else None


def _open_session(shell: InteractiveShell, on_idle: Callable[[], None]) -> Session:
    from nbtrain.notebook.session import Session

    return Session(shell, on_idle)


class Extension:
    """nbtrain in one shell."""

    def __init__(self, shell: InteractiveShell, state: MagicsState) -> None:
        self.shell = shell
        self.state = state
        self.names = self._free_names()
        state.manual = manual.manual(**self.names)
        self._magics: list[tuple[str, str, Callable[..., Any]]] = []
        self._register("line", self.names["distributed"], self._line_magic())
        self._register("cell", self.names["distributed"], self._cell_magic())
        self._register("cell", self.names["rank"], self._rank_magic())
        self._debug = debug_verb.DebugMagic(shell, state)
        if self._debug.there:
            self._register("line", "debug", self._debug.function())
        shell.events.register("pre_run_cell", self._before_cell)
        shell.events.register("post_run_cell", self._after_cell)
        self._forget_completion = completion.install(shell, self.state, self.names)

    def close(self) -> None:
        """Remove the magics, and say so if ranks were stopped with them."""
        self._forget_completion()
        self.shell.events.unregister("pre_run_cell", self._before_cell)
        self.shell.events.unregister("post_run_cell", self._after_cell)
        manager = self.shell.magics_manager
        for kind, name, magic in self._magics:
            if manager.magics[kind].get(name) is magic:  # else another extension has taken the name
                del manager.magics[kind][name]
            if vars(manager.user_magics).get(name) is magic:
                delattr(manager.user_magics, name)
        self._debug.close()
        if self.state.close():
            print("nbtrain: the ranks were stopped; what the notebook has stays, the next cell starts new ones")

    def _free_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        magics = self.shell.magics_manager.magics
        for name, other in INSTEAD.items():
            owner = magics["cell"].get(name) or magics["line"].get(name)
            if owner is not None:
                print(
                    f"nbtrain: %%{name} belongs to {getattr(owner, '__module__', None) or 'another extension'} and "
                    f"is left alone; write %%{other} instead, with the same options"
                )
            names[name] = name if owner is None else other
        return names

    def _register(self, kind: str, name: str, magic: Callable[..., Any]) -> None:
        magic.__name__ = magic.__qualname__ = name
        # Words are read as they were typed: `--wrap {Block}` is a set, not a format string.
        self.shell.magics_manager.register_function(no_var_expand(magic), magic_kind=kind, magic_name=name)
        self._magics.append((kind, name, magic))

    def _before_cell(self, info: Any) -> None:
        self.state.seen = cells.RawCell(info.raw_cell, bool(info.store_history))

    def _after_cell(self, result: Any) -> None:
        if not result.success and result.execution_count:
            self.state.failed.add(result.execution_count)

    def _line_magic(self) -> Callable[..., None]:
        def distributed(line: str) -> None:
            with one_line():
                if line.strip() in ASK:
                    line = "help"
                if "run" in line and verbs.runs_script(self.state, line, self.names["distributed"]):
                    return
                if said := self._line(self.state.read(line)):
                    print(said)

        distributed.__doc__ = self.state.manual
        return distributed

    def _cell_magic(self) -> Callable[..., object]:
        def distributed(line: str, cell: str) -> object:
            with one_line():
                if line.strip() in (*ASK, "help"):
                    print(self.state.manual)
                    return None
                request = self.state.read(line)
                if request.words:
                    name, word = self.names["distributed"], request.words[0].text
                    if word in verbs.VERBS:
                        raise UsageError(f"{word} is a verb and stands on a line of its own: %{name} {word}")
                    hint = instead(request, self.state.notebook)
                    raise UsageError(f"%%{name} takes options only, not {word!r}{hint}")
                return self._run(self.names["distributed"], line, cell, request, self.state.defaults)

        distributed.__doc__ = self.state.manual
        return distributed

    def _rank_magic(self) -> Callable[..., object]:
        def rank(line: str, cell: str) -> object:
            with one_line():
                request = self.state.read(line)
                ranks = parse_ranks(request.words)
                return self._run(self.names["rank"], line, cell, request, self.state.last or self.state.defaults, ranks)

        rank.__doc__ = manual.rank_manual(**self.names)
        return rank

    def _run(
        self, name: str, line: str, body: str, request: Request, base: Request, ranks: tuple[int, ...] | None = None
    ) -> object:
        cell = cells.locate(self.shell, name, line, body, self.state.seen)
        if "batch" in request.given:
            raise UsageError(
                f"{request.given['batch'].typed}: --batch is for %{self.names['distributed']} plan and pick"
            )
        if "locals" in request.given:
            raise UsageError(f"--locals is for %{self.names['distributed']} where")
        if ranks is None:
            self.state.last_cell, self.state.last_line = cell, (request, base)
        if tried := request.trials():
            if ranks is not None:
                raise UsageError(f"{BY_NAME[tried[0]].flag} needs all ranks: write %%{self.names['distributed']}")
            returned: object = annexes.trial(tried[-1])(self.state, request, base, cell)
            return returned
        run = self.state.devices.run(request, base, self.state.notebook, ranks)
        if ranks is None:
            self.state.last = request.over(base)
        return self.state.opened().run(run, cell)

    def _line(self, request: Request) -> str | None:
        if request.words:
            return verbs.run_verb(self.state, request)
        if request.given or request.own:
            check_flags(request, self.state.defaults, self.state.notebook)
            once = [
                option.typed for name, option in request.given.items() if BY_NAME[name].trial or not BY_NAME[name].lasts
            ]
            if once:
                raise UsageError(f"{', '.join(once)} is for one cell, and cannot be a default of all")
            return self.state.set_defaults(request)
        set_so_far = str(self.state.defaults)
        return (
            f"defaults: {set_so_far or 'none set'}\n"
            f"verbs: {', '.join(verbs.VERBS)}\n"
            f"%{self.names['distributed']} help is the manual"
        )


@contextmanager
def one_line() -> Iterator[None]:
    """Shows a UsageError as one line without a traceback, unless ranks had taken steps before it; and nbtrain's other
    errors, and Stop, without the stack of the magic."""
    try:
        yield
    except UsageError as error:
        if hasattr(error, IN_FULL):
            raise
        raise OneLine(str(error)) from None
    except (NbtrainError, KeyboardInterrupt) as error:
        if kernel.renders(error) is None:
            lines = [f"{type(error).__name__}: {error}" if str(error) else type(error).__name__]
            kernel.show_as(error, lines)
        raise
