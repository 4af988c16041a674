"""`%%distributed --compare` and the like: which ways to try a cell in, and how the result is shown."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.notebook.magics.line.options import BY_NAME
from nbtrain.notebook.magics.line.parse import Given, Request
from nbtrain.notebook.magics.line.resolve import Chosen, flags_under
from nbtrain.notebook.magics.line.split_line import Word
from nbtrain.notebook.magics.line.suggestions import similar_flag
from nbtrain.notebook.magics.line.values import ALL, DeviceSpec
from nbtrain.notebook.magics.state import MagicsState

if TYPE_CHECKING:
    from nbtrain.annexes.planning.compare.comparison import Comparison
    from nbtrain.annexes.planning.trials.attempt import RunWay
    from nbtrain.annexes.planning.trials.compare_trials import Question
    from nbtrain.notebook.cell import Cell

OF_TRIALS = frozenset(name for name, option in BY_NAME.items() if option.trial) | {"steps", "memory", "bandwidth"}
"""Options that only a trial has."""


def begin(state: MagicsState, line: Request, base: Request) -> None:
    """Refuse options that exclude each other, and have a session: it imports torch, which must not be interrupted."""
    _check(line, base)
    state.opened()


def _check(line: Request, base: Request) -> None:
    request = line.over(base)
    wanted = request.trials()
    kinds = [name for name in wanted if name != "compare"]
    if len(kinds) > 1 or ("compare" in wanted and {"grow", "verify"} & set(kinds)):
        flags = " and ".join(BY_NAME[name].flag for name in wanted)
        raise UsageError(f"{flags} ask for different things: write one of them in a cell, the other in the next")
    if "compare" in wanted and "strategy" in line.given:
        raise UsageError(f"{line.given['strategy'].typed}: --compare names the strategies; leave one of both out")
    apart = [BY_NAME[name].flag for name in ("verify", "grow") if name in wanted]
    if apart and registry.engine(request.value("engine")).remote:
        raise UsageError(
            f"{apart[0]} is played on the notebook's machine: write --engine local with it, and --devices as many ranks"
        )
    if "background" in line.given and request.value("background"):
        raise UsageError(f"--background: with {BY_NAME[wanted[0]].flag} a cell is only tried; leave one of both out")


def run(state: MagicsState, line: Request, base: Request, cell: Cell) -> None:
    """Try the cell and show the result."""
    begin(state, line, base)
    show(state, cell, ways(state, line, base), question(line.over(base)))


def question(request: Request) -> Question:
    from nbtrain.annexes.planning.trials.compare_trials import Question

    found = Question(steps=request.value("steps"), memory=request.value("memory"))
    if request.value("find_batch"):
        return replace(found, goal="batch")
    if request.value("find_model") is not None:
        name, values = request.value("find_model")
        return replace(found, goal="model", parameter=name, values=values)
    return found


def ways(state: MagicsState, line: Request, base: Request) -> list[RunWay]:
    """One way for each strategy that the line names, otherwise with the same options."""
    request = line.over(base)
    names = request.value("compare") or (request.value("strategy"),)
    if names == (ALL,):
        names = tuple(_available())
    own = _own(state, line, names)
    found = []
    for name in names:
        given = {kept: value for kept, value in line.given.items() if kept != "strategy"}
        if name != "auto":
            given = {"strategy": Given(name, f"--strategy {name}"), **given, **_fewer(state, name, request)}
        found.append(way(state, name, Request(given=given, own=own[name]), base))
    return found


def _fewer(state: MagicsState, name: str, request: Request) -> dict[str, Given]:
    """`--devices` for a strategy that can use fewer than the line asks for."""
    needs = Chosen.named(name, state.notebook).needs
    wanted = request.value("devices").value
    if needs.max_ranks is None or needs.together or not isinstance(wanted, int) or wanted <= needs.max_ranks:
        return {}
    return {"devices": Given(DeviceSpec(needs.max_ranks), f"--devices {needs.max_ranks}")}


def way(state: MagicsState, name: str, line: Request, base: Request) -> RunWay:
    """The way of this line, without what only trials have."""
    from nbtrain.annexes.planning.trials.attempt import RunWay

    line = replace(line, given={kept: value for kept, value in line.given.items() if kept not in OF_TRIALS})
    return RunWay(name=name, line=str(line), spec=partial(state.devices.run, line, base, state.notebook))


def show(state: MagicsState, cell: Cell, tried: list[RunWay], what: Question) -> Comparison:
    """Run the comparison and show it below the cell while it grows."""
    from nbtrain.annexes.planning.trials.attempt import NothingToMeasure
    from nbtrain.annexes.planning.trials.compare_trials import compare

    screen = LiveOutput(state.shell)
    try:
        return compare(state.opened(), tried, cell, what, screen.show)
    except NothingToMeasure:
        screen.clear()  # one sentence says what every row would
        raise


class LiveOutput:
    """One output that is updated as more is known. A terminal shows it once, at the end."""

    def __init__(self, shell: Any) -> None:
        self._publisher = shell.display_pub
        self._page = hasattr(shell, "kernel")
        self._id = uuid.uuid4().hex
        self._shown = False

    def show(self, found: Any, over: bool = False) -> None:
        """`found` has a `repr` and a `_repr_html_`."""
        if not self._page and not over and not getattr(found, "over", False):
            return
        data = {"text/plain": repr(found), "text/html": found._repr_html_()}
        self._publish(data)

    def clear(self) -> None:
        """Take back what is shown."""
        if self._shown:
            self._publish({"text/plain": ""})

    def _publish(self, data: dict[str, str]) -> None:
        self._publisher.publish(data, transient={"display_id": self._id}, update=self._shown and self._page)
        self._shown = True


def _own(state: MagicsState, line: Request, names: Iterable[str]) -> Mapping[str, Mapping[str, Word | None]]:
    """Each strategy's own flags of a line: a strategy gets those that it has; a flag that none has is a mistake."""
    if not line.own:
        return {name: {} for name in names}
    known = {name: flags_under(name, state.notebook) for name in names}
    for typed in line.own:
        if not any(typed in flags for flags in known.values()):
            every = [*(option.flag for option in BY_NAME.values()), *(flag for one in known.values() for flag in one)]
            raise UsageError(f"there is no option {typed} under {', '.join(known)}{similar_flag(typed, every)}")
    return {name: {typed: line.own[typed] for typed in line.own if typed in flags} for name, flags in known.items()}


def _available() -> list[str]:
    """Strategies that can be used here, and that set models up."""
    found = [
        name
        for name, entry in registry.strategies().items()
        if registry.lacking(entry.needs) is None and not entry.package and not entry.load().facts.hands_off
    ]
    if not found:
        raise UsageError("--compare all: no strategy is available here; %distributed strategies says what each lacks")
    return found
