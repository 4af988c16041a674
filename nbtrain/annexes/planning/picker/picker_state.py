"""The state of a picker, without a widget: all that it shows as plain data, and what its buttons do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import nbtrain.machine.devices as devices
from nbtrain.annexes.planning.compare.comparison import Comparison
from nbtrain.annexes.planning.compare.receipt import Receipt
from nbtrain.annexes.planning.picker import options_form, strategy_cards
from nbtrain.annexes.planning.picker.notebook_model import NotebookModel, PlanSettings
from nbtrain.annexes.planning.picker.strategy_cards import Data, variant_name
from nbtrain.annexes.planning.plan.guide import GOALS, LOSSES
from nbtrain.annexes.planning.plan.plan import Plan
from nbtrain.base.errors import NbtrainError, UsageError
from nbtrain.base.specs import PRECISIONS
from nbtrain.machine import registry
from nbtrain.notebook.magics import own_strategies
from nbtrain.notebook.magics.line.options import BY_FLAG
from nbtrain.notebook.magics.line.parse import Request
from nbtrain.notebook.magics.line.resolve import Chosen
from nbtrain.notebook.magics.state import MagicsState

Tell = Callable[[Data], None]

OWN_PLACE = ("strategy", "devices", "batch", "precision", "checkpoint_activations", "memory")
"""options that have their own input in the form, or are about the plan only"""
WRITTEN = {
    "next": "The line is in the next cell. Every {magic} cell now runs with {line}",
    "new": "The line is in a new cell below. Every {magic} cell now runs with {line}",
    "none": "There is no next cell. This is now the default for every {magic} cell; you may also copy the line.",
    "": "Copy the line, or leave it out. Every {magic} cell now runs with {line}",
}
"""what the page has done with the line"""
WORTH = 3
"""strategies that are measured unless the user ticks others"""
FIRST = {"speed": "the fastest", "batch": "the largest batch", "model": "the largest model"}
"""what was measured to be the best, by goal"""


class PickerState:
    """What one picker shows and what its buttons do. All calls come from the kernel's main thread."""

    def __init__(
        self, state: MagicsState, model: NotebookModel, request: Request, magic: str = "distributed", kernel: str = ""
    ) -> None:
        """`request`: the options of `pick`, used over the notebook's defaults; `kernel`: its id."""
        wanted = request.over(state.defaults)
        self._state = state
        self._model = model
        self._magic = magic
        self._kernel = kernel
        self._machine = devices.here()
        self._entries = registry.strategies()
        self._kind = "cuda" if self._machine.cards() and wanted.value("accelerator") != "cpu" else "cpu"
        self._plan: Plan | None = None
        self._lacks = ""
        """why there is no plan"""
        self._samples = 0
        """in a batch of the notebook's own"""
        self._compared: Comparison | None = None
        self._measured: tuple[PlanSettings | None, dict[str, str]] = None, {}
        """under which settings, and which variants, by their lines"""
        self._receipt: Receipt | None = None
        self._busy = ""
        self._said: tuple[str, str] = ("", "")
        self._answered = 0
        """number of the page's last message, so that it knows what has been received"""
        self._touched = False
        """the user has chosen a strategy: the recommended one does not replace it"""
        self.settings = PlanSettings(
            devices=devices_of(wanted, state.devices.world_size(), self._count), precision=wanted.value("precision")
        )
        self._more = [given.typed for name, given in request.given.items() if name not in OWN_PLACE]
        """the other options of `pick`, as typed"""
        self.strategy: str = registry.AUTO[self.ranks > 1]
        self.typed: dict[str, str] = {}
        """options of the strategy that are not as usual, by field"""
        self.recompute = ""
        """classes whose activations are recomputed"""
        if wanted.value("strategy") != "auto":
            self._adopt(wanted)
        self.tell: Tell = lambda data: None
        """called with the data whenever it has changed"""

    @property
    def ranks(self) -> int:
        return ranks_of(self.settings.devices, self._count)

    @property
    def _count(self) -> int:
        """The default number of ranks."""
        return len(self._machine.cards()) if self._kind == "cuda" else min(4, self._machine.cores)

    def line(self) -> str:
        """The chosen options, as they are typed. Raises what is wrong with them."""
        chosen = self._chosen
        if lacks := strategy_cards.against(chosen.needs, self._kind, self.ranks):
            raise UsageError(f"{self.strategy}: {lacks}")
        if self._loaded:
            own_strategies.check_options(chosen.load(), options_form.values(chosen, self.typed, self._state.notebook))
        words = [f"--strategy {self.strategy}"]
        words.append(f"--devices {1 if chosen.needs.max_ranks == 1 and self.ranks > 1 else self.settings.devices}")
        words += self._more
        usual = self._state.defaults.value("precision")
        if {self.settings.precision, usual} != {PRECISIONS[0]}:
            words.append(f"--precision {self.settings.precision}")
        if self.recompute:
            words.append(f"--checkpoint-activations {self.recompute}")
        return " ".join([*words, *options_form.words(self._inputs())])

    def data(self) -> Data:
        """All that the picker shows."""
        plan = None if self._plan is None else self._plan.data() | self._against_plan()
        name = variant_name(self.strategy, self.recompute)
        cards = strategy_cards.cards(self._entries, self._state.notebook, self._kind, self.ranks, plan, name)
        try:
            line, wrong = f"%%{self._magic} {self.line()}", ""
        except UsageError as error:
            line, wrong = "", str(error)
        self._fill(cards)
        cards = strategy_cards.by_goal(cards, self.settings.goal, self.ranks)
        return {
            "kernel": self._kernel,
            "magic": self._magic,
            "flags": {typed: option.name for typed, option in BY_FLAG.items()},
            "found": strategy_cards.found(self._machine, self._kind),
            **asdict(self.settings),
            "ranks": self.ranks,
            "precisions": list(PRECISIONS),
            "plan": None if plan is None else {key: value for key, value in plan.items() if key != "rows"},
            "lacks": self._lacks,
            "cards": cards,
            "strategy": self.strategy,
            "options": [asdict(one) for one in self._inputs()],
            "line": line,
            "wrong": wrong,
            "note": self._note(),
            "cell": self._model.cell(),
            "worth": self._worth(),
            "compared": None if self._compared is None else self._compared.data(),
            "receipt": None if self._receipt is None else self._receipt.data(),
            "busy": self._busy,
            "said": list(self._said),
            "answered": self._answered,
        }

    def begin(self) -> None:
        """Fill in what was shown empty at first."""
        self._replan()

    def do(self, message: Mapping[str, Any]) -> None:
        """Carry out a request of the page."""
        what, self._said, self._answered = message.get("kind"), ("", ""), message.get("seq", 0)
        try:
            if what == "set":
                self._set(str(message["name"]), message["value"])
            elif what == "option":
                self._type(str(message["name"]), str(message["value"]))
            elif what == "take":
                self._adopt(self._state.read(str(message["line"])))
            elif what == "measure":
                self.measure([str(name) for name in message["names"]], str(message.get("goal", GOALS[0])))
            elif what == "verify":
                self.verify()
            elif what == "use":
                self.use(str(message.get("written", "")))
        except NbtrainError as error:
            self._said = str(error), "bad"
        except Exception as error:  # nobody else would hear of it
            self._said = f"{type(error).__name__}: {error}", "bad"
        except KeyboardInterrupt:
            self._said = "Stopped. What was measured stays.", "wait"
        finally:
            self._busy = ""
            self.tell(self.data())

    def measure(self, names: Sequence[str], goal: str = GOALS[0]) -> None:
        """Run the loop for a few steps under each of these variants; returns when all are done."""
        candidates = [self._candidate(name) for name in names]
        if not candidates:
            raise UsageError("Nothing is ticked: tick the strategies to measure.")
        self._busy = "measure"
        lines = (line for _, line in candidates)
        self._measured = replace(self.settings, goal=goal), dict(zip(lines, names, strict=True))
        self.tell(self.data())
        self._compared = self._model.measure(candidates, goal, self._hear)
        self._follow()
        self.tell(self.data())

    def verify(self) -> None:
        """Run the first steps with the chosen options, and as one process; returns when both are done."""
        line = self.line()
        self._busy = "verify"
        self.tell(self.data())
        self._model.verify(self.strategy, line, self._hear_receipt)

    def use(self, written: str = "") -> str:
        """Set the defaults; returns the line. `written`: what the page has done with it, one of WRITTEN."""
        line = self.line()
        request = self._state.read(line)
        # Own options of another strategy, given earlier, do not belong to this one.
        self._state.defaults = replace(self._state.defaults, own={})
        self._state.set_defaults(request)
        self._said = WRITTEN[written].format(magic=f"%%{self._magic}", line=line), "good"
        return f"%%{self._magic} {line}"

    def _set(self, name: str, value: Any) -> None:
        if name == "ranks":
            self.settings = replace(self.settings, devices=str(whole(name, value)))
        elif name == "batch":
            self.settings = replace(self.settings, batch=whole(name, value) if value not in (None, "") else None)
        elif name in ("goal", "loss", "precision"):
            allowed = {"goal": GOALS, "loss": LOSSES, "precision": PRECISIONS}[name]
            if value not in allowed:
                raise UsageError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
            self.settings = replace(self.settings, **{name: value})
        if name in ("goal", "loss") and self._plan is not None:
            self._plan = replace(self._plan, goal=self.settings.goal, loss=self.settings.loss)
            self._follow()
        else:
            self._replan()

    def _type(self, name: str, value: str) -> None:
        known = {one.field: one for one in self._inputs()}
        if name not in known:
            raise UsageError(f"{self.strategy} has no option {name}")
        self.typed.pop(name, None)
        if value != known[name].usual:
            self.typed[name] = value

    def _adopt(self, request: Request) -> None:
        """Take the strategy and its options from a line; the devices stay."""
        self._touched = True
        self.strategy = request.value("strategy")
        self.typed = options_form.typed_of(self._chosen, request.own)
        self.recompute = ",".join(request.value("checkpoint_activations"))

    def _replan(self) -> None:
        self._busy = "plan"
        self.tell(self.data())
        try:
            self._plan, self._lacks = self._model.plan(self.settings), ""
            if self.settings.batch is None:
                self._samples = self._plan.profile.samples
        except NbtrainError as error:
            self._plan, self._lacks = None, str(error)
        self._follow()
        self._busy = ""
        self.tell(self.data())

    def _follow(self) -> None:
        best = self._plan.recommended if self._plan is not None else None
        if best is not None and not self._touched:
            self._adopt(self._state.read(self._against_plan().get("line", best.line)))
            self._touched = False

    def _against_plan(self) -> Data:
        """What to recommend, and why, where a measurement under these settings contradicts the plan."""
        found, planned = self._compared, self._plan.recommended if self._plan is not None else None
        under, names = self._measured
        if found is None or not found.over or planned is None or under != self.settings:
            return {}
        first = {names[row.line]: row for row in found.contenders if row.line in names}
        if planned.name in first or planned.name not in {names.get(row.line) for row in found.rows}:
            return {}
        if not first:
            return {"recommended": None, "why": f"{planned.name}, which the plan takes, failed when it was measured"}
        name = max(first, key=lambda one: first[one].pace)
        said = f"{name} was measured here to be {FIRST[found.goal]}, and not {planned.name}, which the plan takes"
        return {"recommended": name, "why": said, "line": first[name].line}

    def _hear(self, comparison: Comparison) -> None:
        self._compared = comparison
        self.tell(self.data())

    def _hear_receipt(self, receipt: Receipt) -> None:
        self._receipt = receipt
        self.tell(self.data())

    @property
    def _chosen(self) -> Chosen:
        return Chosen.named(self.strategy, self._state.notebook)

    @property
    def _loaded(self) -> bool:
        """Whether options can be shown: they are read from a strategy's class, which imports torch. A notebook without
        torch has nothing to train yet."""
        return "torch" in sys.modules

    def _inputs(self) -> list[options_form.Input]:
        return options_form.inputs(self._chosen, self.typed) if self._loaded else []

    def _candidate(self, name: str) -> tuple[str, str]:
        """Name and line of a variant; of the chosen one with its options."""
        if name == variant_name(self.strategy, self.recompute):
            return " ".join([name, *options_form.words(self._inputs())]), self.line()
        row = next((row for row in self._plan.rows if row.name == name), None) if self._plan is not None else None
        if row is not None:
            return name, row.line
        chosen = Chosen.named(name, self._state.notebook)
        return name, f"--strategy {name} --devices {1 if chosen.needs.max_ranks == 1 else self.settings.devices}"

    def _note(self) -> str:
        """What the user has to change besides the line."""
        if self.settings.batch in (None, self._samples) or not self._samples:
            return ""
        return (
            f"Planned for batches of {self.settings.batch:,}. The notebook's have {self._samples:,}: make the loader "
            f"with batch_size={self.settings.batch}."
        )

    def _worth(self) -> list[str]:
        """What to measure unless the user ticks others: the recommended, the chosen, and what suits the goal."""
        names = [variant_name(self.strategy, self.recompute)]
        if self._plan is not None:
            best = self._plan.recommended
            fitting = [
                (row.world.ranks < self.ranks, row.place if self.settings.goal == "speed" else row.peak, row.name)
                for row in self._plan.worthwhile
                if row.fits and not row.recompute and row.place is not None
            ]
            names = [*([best.name] if best is not None else []), *names, *(name for *_, name in sorted(fitting))]
        return list(dict.fromkeys(names))[:WORTH]

    def _fill(self, cards: Sequence[Data]) -> None:
        """Fill in figures that the plan has no row for: of typed options, and of other names."""
        if self._plan is None:
            return
        for card in cards:
            shown, typed = card["shown"], self.typed if card["chosen"] else {}
            if card["reason"] or (shown["planned"] and not typed) or (card["chosen"] and self.recompute):
                continue
            chosen = Chosen.named(shown["name"], self._state.notebook)
            with suppress(UsageError):  # which is shown in place of the line
                options = options_form.values(chosen, typed, self._state.notebook)
                shown |= strategy_cards.exact(self._plan, shown["name"], chosen, options)


def devices_of(defaults: Request, running: int | None, count: int) -> str:
    """The value of `--devices` to begin with, as it is typed."""
    if "devices" in defaults.given and not defaults.value("devices").chosen_by_us:
        return defaults.given["devices"].typed.partition(" ")[2]
    return str(running or count)


def ranks_of(typed: str, count: int) -> int:
    """How many ranks `4`, `"0,2"`, `free:2` and `-1` are."""
    text = typed.strip("\"'")
    if text == typed and text.isdecimal():
        return max(1, int(text))
    if text.startswith("free:"):
        return int(text[5:])
    if text in ("-1", "auto"):
        return count
    return max(1, len([part for part in text.strip("[]()").split(",") if part.strip()]))


def whole(name: str, value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise UsageError(f"{name} must be a whole number, 1 or more, not {value!r}")
    return number
