"""`%distributed plan` and `nbtrain.plan()`: what the notebook's model would need under each strategy."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nbtrain.annexes.planning.plan.device_memory import DeviceMemory
from nbtrain.annexes.planning.plan.guide import GOALS, LOSSES
from nbtrain.annexes.planning.plan.plan import Plan
from nbtrain.annexes.planning.plan.plan_rows import make
from nbtrain.base.errors import UsageError
from nbtrain.machine import registry
from nbtrain.notebook.magics.line.parse import Request, parse
from nbtrain.notebook.magics.line.resolve import Chosen, Resolver, own_options
from nbtrain.notebook.magics.line.values import Namespace
from nbtrain.notebook.magics.own_strategies import of_notebook
from nbtrain.notebook.magics.state import MagicsState
from nbtrain.strategies.base import is_lazy

if TYPE_CHECKING:
    from nbtrain.annexes.planning.profile.model_and_batch import ModelAndBatch

LARGE = 300_000_000
"""parameters from which on the user is told that profiling takes a while"""


def show(state: MagicsState, request: Request) -> None:
    """`%distributed plan net --devices 4`"""
    name = request.argument("the name of one model")
    from nbtrain.annexes.planning.profile.model_and_batch import find_model_and_batch  # on use: torch

    wanted = request.over(state.defaults)
    found = find_model_and_batch(state.notebook, name, wanted.value("batch"))
    if (count := sum(p.numel() for p in found.model.parameters() if not is_lazy(p))) > LARGE:
        print(f"looking at what {found.name}, {count / 1e9:.2g} billion parameters, does in a step …", flush=True)
    plan = plan_of(found, state.notebook, wanted, ranks_of(state))
    state.shell.display_pub.publish({"text/plain": repr(plan), "text/html": plan._repr_html_()})


def plan_of(
    found: ModelAndBatch,
    notebook: Namespace,
    wanted: Request,
    ranks: Collection[int],
    goal: str = "speed",
    loss: str = "any",
) -> Plan:
    """`wanted`: the line over the defaults. `ranks`: processes whose memory will be free. Starts and leases nothing."""
    if registry.engine(wanted.value("engine")).remote:
        raise UsageError(
            "the plan knows the memory of the notebook's machine only: write --engine local, with --devices as many "
            "ranks as all machines have, --nodes, and --memory with what a rank has there"
        )
    counting = Resolver()  # not the notebook's own, which would release the cards of its ranks
    try:
        pool = counting.pool(wanted)
    finally:
        counting.forget()
    devices = DeviceMemory.of(pool, wanted.value("precision"), wanted.value("accumulate"), ranks)
    if limit := wanted.value("memory"):
        devices = devices.at_most(limit, wanted.given["memory"].typed)
    name = wanted.value("strategy")
    given = {}
    if name != "auto" and wanted.own:
        chosen = Chosen.named(name, notebook)
        given = {chosen.name: own_options(chosen, name, Request(), wanted, notebook)}
    return make(
        found.profile(devices.precision),
        devices,
        own=of_notebook(notebook),
        given=given,
        bandwidth=wanted.value("bandwidth") or None,
        goal=goal,
        loss=loss,
    )


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
    from nbtrain.annexes.planning.profile.model_and_batch import find_model_and_batch, find_optimizer

    for what, value, known in (("goal", goal, GOALS), ("loss", loss, LOSSES)):
        if value not in known:
            raise UsageError(f"{what}={value!r}: there are {', '.join(known)}")
    notebook = dict(state.notebook if state is not None else vars(sys.modules["__main__"]))
    line = " ".join(f"--{name} {typed(value)}" for name, value in options.items() if value is not None)
    wanted = parse(line, notebook).over(state.defaults if state is not None else Request())
    found = find_model_and_batch(notebook, named(model, "model", notebook), named(batch, "batch", notebook))
    if optimizer is not None:
        found = replace(found, optimizer=find_optimizer(notebook, optimizer))
    return plan_of(found, notebook, wanted, ranks_of(state), goal, loss)


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
