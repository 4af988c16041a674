"""`%distributed pick` and `nbtrain.picker()`: shows the widget and connects it to the notebook."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbtrain.defer_interrupts import shielded
from nbtrain.errors import UsageError
from nbtrain.magics import cells, plan_verb
from nbtrain.magics.line.parse import Request
from nbtrain.magics.picker.picker_state import PickerState
from nbtrain.magics.picker.wishes import Wish
from nbtrain.magics.state import MagicsState
from nbtrain.planning.plan.plan import Plan
from nbtrain.runs import run_folder
from nbtrain.views import no_widget

if TYPE_CHECKING:
    from nbtrain.planning.compare.comparison import Comparison
    from nbtrain.planning.compare.receipt import Receipt
    from nbtrain.session import Cell

Do = Callable[[Mapping[str, Any]], None]

STEPS = 10
"""steps that are measured of each"""
NO_MODEL = (
    "There is no model yet, so nothing is known of memory: make one, an nn.Module, and a batch or a DataLoader for it, "
    "and run %distributed pick again."
)


def pick(state: MagicsState, request: Request) -> None:
    """`%distributed pick net --batch loader --devices 4`"""
    names = [word.plain for word in request.words[1:]]
    if len(names) > 1:
        raise UsageError(f"pick takes the name of one model: what is {' '.join(names[1:])!r}?")
    Picker(state, names[0] if names else "", request)._ipython_display_()


def picker(
    state: MagicsState | None, model: Any = None, batch: Any = None, *, plain: bool = False, **options: Any
) -> Picker:
    """`nbtrain.picker()` for the notebook that calls. `state`: None where the extension is not loaded; `plain`: made of
    ipywidgets alone; `options`: those of the magic, by name."""
    if state is None:
        raise UsageError("nbtrain is not loaded here; %load_ext nbtrain loads it")
    notebook = state.notebook
    names = [plan_verb.named(model, "model", notebook), plan_verb.named(batch, "batch", notebook)]
    given = {name: value for name, value in options.items() if value is not None}
    line = " ".join(f"--{name} {plan_verb.typed(value)}" for name, value in given.items())
    return Picker(state, names[0], state.read(f"{line} --batch {names[1]}" if names[1] else line), plain)


class Picker:
    """The picker below the cell. `line` has the options that are chosen in it."""

    def __init__(self, state: MagicsState, model: str, request: Request, plain: bool = False) -> None:
        if getattr(state.shell, "kernel", None) is None:
            raise UsageError("pick needs a notebook, and this is a terminal; %distributed plan says the same as text")
        self._shell = state.shell
        self._choice = PickerState(
            state, Notebook(state, model, request), request, _magic(state.shell), run_folder.kernel()
        )
        self._view, self._bundle, self._metadata = _shown(
            self._choice, _in_main_thread(state.shell, self._choice), plain
        )
        self._choice.tell = self._view.show

    @property
    def line(self) -> str:
        """The options that are chosen, as they are typed."""
        return self._choice.line()

    def _ipython_display_(self) -> None:
        """Show it at once, and fill in what the model needs."""
        said = {"text/plain": "the strategy picker, which needs a kernel: %distributed pick shows it again"}
        self._shell.display_pub.publish({**said, **self._bundle}, self._metadata)
        self._choice.begin()


class Notebook:
    """The notebook's model, and the cell that trains it, as the picker needs them."""

    def __init__(self, state: MagicsState, model: str, request: Request) -> None:
        self._state = state
        self._model = model
        self._request = request
        self._loop = ""
        """a training loop for the model, for when no cell was run"""

    def plan(self, wish: Wish) -> Plan:
        if "torch" not in sys.modules:
            raise UsageError(NO_MODEL)
        from nbtrain.magics.picker.training_loop import loop, resized  # on use: torch

        state = self._state
        base = self._request.over(state.defaults)
        found = plan_verb.subject_of(state.notebook, self._model, base.value("batch"))
        self._loop = loop(found, state.notebook)
        if wish.batch is not None:
            found = replace(found, batch=resized(found.batch, wish.batch))
        wanted = state.read(f"--devices {wish.devices} --precision {wish.precision}").over(base)
        return plan_verb.plan_of(found, state.notebook, wanted, plan_verb.ranks_of(state), wish.goal, wish.loss)

    def cell(self) -> str:
        last = self._state.last_cell
        if last is not None:
            number = f" [{last.number}]" if last.number is not None else ""
            return f"Measure and Verify run the cell{number} that was run last: {STEPS} steps each time"
        if self._loop:
            return (
                f"Measure runs forward, backward and step, {STEPS} times under each; the loop of a %%distributed cell, "
                "once one was run"
            )
        return "Measure needs a loop: run a %%distributed cell first"

    def measure(
        self, candidates: Sequence[tuple[str, str]], goal: str, told: Callable[[Comparison], None]
    ) -> Comparison:
        from nbtrain.magics import trial_options
        from nbtrain.session.trials.compare_trials import Question

        cell, state = self._cell(), self._state
        ways = [trial_options.way(state, name, state.read(line), state.defaults) for name, line in candidates]
        question = Question(goal=goal, steps=STEPS, memory=self._request.value("memory"))
        with shielded():
            session = state.opened()
        return session.compare(ways, cell, question, told)

    def verify(self, name: str, line: str, told: Callable[[Receipt], None]) -> Receipt:
        from nbtrain.magics import trial_options

        cell, state = self._cell(), self._state
        with shielded():
            session = state.opened()
        return session.verify(trial_options.way(state, name, state.read(line), state.defaults), cell, STEPS, told)

    def _cell(self) -> Cell:
        if self._state.last_cell is not None:
            return self._state.last_cell
        if not self._loop:
            raise UsageError("there is no loop to measure: run a %%distributed cell first")
        return cells.locate(self._state.shell, "distributed", "", self._loop, None)


def _shown(choice: PickerState, do: Do, plain: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The view, and the bundle and metadata that show it."""
    if not plain and not no_widget():
        from nbtrain.views.picker import Picker as Widget

        view = Widget(choice.data(), do)
        return view, *view.bundle
    try:
        from nbtrain.views.picker_form import PickerForm
    except ImportError as error:
        raise UsageError(f"pick needs ipywidgets ({error}): pip install ipywidgets") from None
    form = PickerForm(choice.data(), do)
    return form, *form.bundle


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
    """Let ■ interrupt what was not started as a cell, too."""
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
    return "distributed" if getattr(magic, "__module__", "") == "nbtrain.magics.extension" else "nbtrain"
