"""`%distributed plan` and `nbtrain.plan()`: what the notebook's model would need under each strategy."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbtrain.errors import UsageError
from nbtrain.magics.line import flags
from nbtrain.magics.line.parse import Request, parse
from nbtrain.magics.line.resolve import Chosen, Resolver
from nbtrain.magics.line.values import Namespace
from nbtrain.magics.own_strategies import of_notebook
from nbtrain.magics.state import MagicsState
from nbtrain.planning.plan.device_memory import DeviceMemory, ground
from nbtrain.planning.plan.plan import Plan
from nbtrain.specs import PoolSpec

if TYPE_CHECKING:
    from nbtrain.planning.profile.subject import Subject

LARGE = 300_000_000
"""parameters from which on the user is told that profiling takes a while"""


def show(state: MagicsState, request: Request) -> None:
    """`%distributed plan net --devices 4`"""
    names = [word.plain for word in request.words[1:]]
    if len(names) > 1:
        raise UsageError(f"plan takes the name of one model: what is {' '.join(names[1:])!r}?")
    wanted = request.over(state.defaults)
    found = subject_of(state.notebook, names[0] if names else "", wanted.value("batch"))
    if (count := _weights(found.model)) > LARGE:
        print(f"looking at what {found.name}, {count / 1e9:.2g} billion parameters, does in a step …", flush=True)
    plan = plan_of(found, state.notebook, wanted, ranks_of(state))
    state.shell.display_pub.publish({"text/plain": repr(plan), "text/html": plan._repr_html_()})


def _weights(model: Any) -> int:
    """How many parameters the model has, without lazy layers, whose sizes are not known yet."""
    from nbtrain.strategies.base import is_lazy

    return sum(p.numel() for p in model.parameters() if not is_lazy(p))


def subject_of(notebook: Namespace, model: str, batch: str) -> Subject:
    from nbtrain.planning.profile.subject import subject  # it loads torch

    return subject(dict(notebook), model, batch)


def plan_of(
    found: Subject,
    notebook: Namespace,
    wanted: Request,
    ranks: Iterable[int] = (),
    goal: str = "speed",
    loss: str = "any",
) -> Plan:
    """`wanted`: the line over the defaults. `ranks`: processes whose memory will be free. Starts and leases nothing."""
    from nbtrain.planning.plan.make_plan import plan

    return plan(
        found,
        ground_of(wanted, ranks),
        own=of_notebook(notebook),
        given=given(wanted, notebook),
        bandwidth=wanted.value("bandwidth") or None,
        goal=goal,
        loss=loss,
    )


def ground_of(wanted: Request, ranks: Iterable[int] = ()) -> DeviceMemory:
    """The memory of the devices that a cell with these options would have."""
    at = ground(pool(wanted), wanted.value("precision"), wanted.value("accumulate"), tuple(ranks))
    limit = wanted.value("memory")
    return at.at_most(limit, f"{wanted.given['memory'].typed}") if limit else at


def pool(wanted: Request) -> PoolSpec:
    """The pool that a cell would have."""
    counting = Resolver()  # not the notebook's own, which would release the cards of its ranks
    try:
        return counting.pool(wanted)
    finally:
        counting.forget()


def given(wanted: Request, notebook: Namespace) -> Mapping[str, Mapping[str, Any]]:
    """Options of the strategy that is set as a default, for its row."""
    name = wanted.value("strategy")
    if name == "auto" or not wanted.own:
        return {}
    chosen = Chosen.named(name, notebook)
    known = chosen.flags()
    own = {
        known[typed].field: flags.read(typed, word, known[typed], notebook)
        for typed, word in wanted.own.items()
        if typed in known
    }
    return {chosen.name: {**chosen.carried(), **own}}


def ranks_of(state: MagicsState | None) -> tuple[int, ...]:
    """Processes of the ranks that run."""
    ranks = getattr(state.session, "ranks", None) if state is not None else None
    return ranks.pids if ranks is not None else ()


# ---------------------------------------------------------------- for programs


def for_programs(
    state: MagicsState | None, model: Any, batch: Any, optimizer: Any, options: Mapping[str, Any], goal: str, loss: str
) -> Plan:
    """`nbtrain.plan()`. `state`: of the notebook that calls, where the extension is loaded. `options`: those of the
    magic, by name; None: the notebook's default."""
    from nbtrain.planning.plan.guide import GOALS, LOSSES

    for what, value, known in (("goal", goal, GOALS), ("loss", loss, LOSSES)):
        if value not in known:
            raise UsageError(f"{what}={value!r}: there are {', '.join(known)}")
    notebook = dict(state.notebook if state is not None else vars(sys.modules["__main__"]))
    line = " ".join(f"--{name} {typed(value)}" for name, value in options.items() if value is not None)
    wanted = parse(line, notebook).over(state.defaults if state is not None else Request())
    found = subject_of(notebook, named(model, "model", notebook), named(batch, "batch", notebook))
    if optimizer is not None:
        found = replace(found, optimizer=optimizer_of(optimizer, notebook))
    return plan_of(found, notebook, wanted, ranks_of(state), goal, loss)


def optimizer_of(value: Any, notebook: Mapping[str, Any]) -> Any:
    """The optimizer itself, or the notebook's of this name."""
    from nbtrain.planning.profile.subject import optimizer

    return optimizer(notebook, value)


def typed(value: Any) -> str:
    """As it is typed on the line."""
    if isinstance(value, (list, tuple)):
        return '"' + ",".join(map(str, value)) + '"'
    if isinstance(value, str) and value.replace(",", "").replace(" ", "").isdecimal():
        return f'"{value}"'
    return str(value)


def named(value: Any, what: str, notebook: dict[str, Any]) -> str:
    """The notebook's name of an object; an object without a name gets one in this copy."""
    if value is None or isinstance(value, str):
        return value or ""
    for name, held in notebook.items():
        if held is value and not name.startswith("_"):
            return name
    name = what if what not in notebook else f"the_{what}"
    notebook[name] = value
    return name
