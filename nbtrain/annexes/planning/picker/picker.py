"""`%distributed pick` and `nbtrain.picker()`: shows the widget and connects it to the notebook."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from nbtrain.annexes.planning import plan_verb
from nbtrain.annexes.planning.picker.notebook_model import NotebookModel
from nbtrain.annexes.planning.picker.picker_state import PickerState
from nbtrain.base.errors import UsageError
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.state import MagicsState
from nbtrain.watch.runs import run_folder
from nbtrain.watch.views import no_widget

Do = Callable[[Mapping[str, Any]], None]


def pick(state: MagicsState, request: Request) -> None:
    """`%distributed pick net --batch loader --devices 4`"""
    Picker(state, request.argument("the name of one model"), request)._ipython_display_()


def picker(state: MagicsState | None, model: Any = None, batch: Any = None, **options: Any) -> Picker:
    """`nbtrain.picker()` for the notebook that calls. `state`: None where the extension is not loaded; `options`: those
    of the magic, by name."""
    if state is None:
        raise UsageError("nbtrain is not loaded here; %load_ext nbtrain loads it")
    notebook = state.notebook
    names = [plan_verb.named(model, "model", notebook), plan_verb.named(batch, "batch", notebook)]
    given = {name: value for name, value in options.items() if value is not None}
    line = " ".join(f"--{name} {plan_verb.typed(value)}" for name, value in given.items())
    return Picker(state, names[0], state.read(f"{line} --batch {names[1]}" if names[1] else line))


class Picker:
    """The picker below the cell. `line` has the options that are chosen in it."""

    def __init__(self, state: MagicsState, model: str, request: Request) -> None:
        if getattr(state.shell, "kernel", None) is None:
            raise UsageError("pick needs a notebook, and this is a terminal; %distributed plan says the same as text")
        if lacking := no_widget():
            raise UsageError(f"pick cannot be shown: {lacking}; %distributed plan says the same as text")
        from nbtrain.watch.views.dashboard_widget import PickerWidget  # on use: anywidget takes long to import

        self._shell = state.shell
        self._choice = PickerState(
            state, NotebookModel(state, model, request), request, _magic(state.shell), run_folder.kernel()
        )
        self._view = PickerWidget(self._choice.data(), _in_main_thread(state.shell, self._choice))
        self._choice.tell = self._view.show

    @property
    def line(self) -> str:
        """The options that are chosen, as they are typed."""
        return self._choice.line()

    def _ipython_display_(self) -> None:
        """Show it at once, and fill in what the model needs."""
        said = {"text/plain": "the strategy picker, which needs a kernel: %distributed pick shows it again"}
        bundle, metadata = self._view.bundle
        self._shell.display_pub.publish({**said, **bundle}, metadata)
        self._choice.begin()


def _in_main_thread(shell: Any, choice: PickerState) -> Do:
    """Run the page's requests in the main thread, after the cell that runs: they start ranks and change defaults, and
    newer kernels receive them in other threads."""

    def do(message: Mapping[str, Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            choice.do(message)
        else:
            shell.kernel.io_loop.add_callback(_interruptible, choice, message)

    return do


def _interruptible(choice: PickerState, message: Mapping[str, Any]) -> None:
    """Let ■ interrupt a request of the page, which is no cell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        choice.do(message)
    except KeyboardInterrupt:  # a second one, while the first was being shown
        pass
    finally:
        signal.signal(signal.SIGINT, before)


def _magic(shell: Any) -> str:
    """The name of nbtrain's cell magic here: another extension may have taken the first."""
    magic = shell.magics_manager.magics["cell"].get("distributed")
    return "distributed" if getattr(magic, "__module__", "") == "nbtrain.notebook.magics.extension" else "nbtrain"
