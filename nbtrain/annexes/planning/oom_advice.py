"""Advice after a cell ran out of memory: the line that needs less, with another strategy or other options."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import nbtrain.base.humanize as humanize
import nbtrain.machine.registry as registry
from nbtrain.annexes.planning.plan import guide
from nbtrain.annexes.planning.plan.device_memory import DeviceMemory
from nbtrain.annexes.planning.plan.guide import TrainingWay
from nbtrain.base.specs import Needs, RunSpec, asked
from nbtrain.exchange.names.cell_names import Captured
from nbtrain.notebook.report.oom_report import LESS

MODULES = 600
"""A larger model takes too long to profile while the user waits for the error."""
FIRST = "First: %distributed recover brings home what the ranks hold, or %distributed stop discards it."
OF_A_TRIAL = ("split_batches", "sampler")
"""options of a run that matter to a trial"""
IN_THE_LINE = ("accumulate", "checkpoint_activations")
"""and those that stand in a plan's line"""


def instead(
    names: Captured, notebook: Mapping[str, Any], run: RunSpec, pids: Iterable[int] = (), held: bool = False
) -> str:
    """The plan's alternative, and how to find the largest batch. `names`: what the cell reads; `pids`: processes of the
    ranks; `held`: they hold a step of the cell, which the next cell would drop."""
    first = FIRST if held else ""
    if run.pool.machines is not None:  # what the plan knows of memory is this machine's
        return f"{first} {LESS}".strip()
    try:
        at = DeviceMemory.of(run.pool, run.precision, run.accumulate, tuple(pids))
    except Exception:  # a missing driver, say: the user still has to be told that memory ran out
        return f"{first} {LESS}".strip()
    try:
        better = _planned(names, notebook, run, at) if "torch" in sys.modules else _guided(run, at)
    except Exception:  # it cannot be profiled (it needs what is behind a handle …); the guide needs no profile
        better = _guided(run, at)
    batch = f"The largest batch that fits: %%distributed {_typed(run, at)} --find-batch"
    return " ".join(filter(None, [first, better, f"{batch}.", LESS]))


def _planned(names: Captured, notebook: Mapping[str, Any], run: RunSpec, at: DeviceMemory) -> str:
    """The plan's alternative, with figures."""
    from nbtrain.annexes.planning.plan.plan_rows import Candidate, make, planned
    from nbtrain.annexes.planning.profile.model_and_batch import find_model_and_batch
    from nbtrain.annexes.planning.profile.recompute import recomputed

    found = find_model_and_batch({name: notebook[name] for name in (*names.hard, *names.soft) if name in notebook})
    if sum(1 for _ in found.model.modules()) > MODULES:
        return _guided(run, at)
    made = found.profile(run.precision)
    blocks = next((name for name in run.checkpoint_activations if any(u.kind == name for u in made.units)), "")
    entry = registry.find_strategy(run.strategy)
    failed = planned(
        Candidate(
            name=run.strategy,
            needs=entry.needs if entry is not None else Needs(),
            source=entry or notebook[run.strategy],
            options=run.options,
        ),
        recomputed(made, blocks) if blocks else made,
        at,
    )
    better = make(made, at, recompute=blocks).less_than(failed)
    if better is None or failed.estimate is None:
        return _guided(run, at)
    of = "rank" if better.world.devices == 1 else "device"
    least, most = humanize.size(better.peak), humanize.size(failed.peak)
    line = " ".join([better.line, *_rest(run)])
    said = f"The plan for {found.name}: {better.name} needs about {least} per {of} instead of {most}"
    return f"{said}: %%distributed {line}."


def _guided(run: RunSpec, at: DeviceMemory) -> str:
    """The next strategy of the guide that can be used here, without figures."""
    from nbtrain.annexes.planning.plan.plan_rows import candidates, lacking

    known = {one.name: one for one in candidates({}, {}, at.pool.nodes) if not lacking(one, at)}
    for way in guide.less_than(run.strategy, bool(run.checkpoint_activations)):
        if way.name in known and _saves(way, at):
            line = " ".join([at.line(way.name, at.world(known[way.name].needs)), *_rest(run)])
            return f"{way.name} needs less: it {way.why}: %%distributed {line}."
    return ""


def _saves(way: TrainingWay, at: DeviceMemory) -> bool:
    """Whether it needs less memory on these devices."""
    if way.recompute:  # the classes to name are not known here
        return False
    if "offload" in way.name:
        return at.pool.kind != "cpu"
    return at.count > 1


def _typed(run: RunSpec, at: DeviceMemory) -> str:
    """The line as it was typed, for a trial."""
    entry = registry.find_strategy(run.strategy)
    again = f"{guide.RECOMPUTE} {','.join(run.checkpoint_activations)}" if run.checkpoint_activations else ""
    world = at.world(entry.needs if entry is not None else Needs())
    return " ".join([at.line(run.strategy, world, (humanize.flags(run.options), again)), *_rest(run, tried=True)])


def _rest(run: RunSpec, tried: bool = False) -> Sequence[str]:
    """The other options of the line. `tried`: only those that matter to a trial."""
    said = {name: value for name, value in asked(run).items() if name in OF_A_TRIAL or not tried}
    start = {} if run.pool.start == "warm" else {"start": run.pool.start}
    others = {name: value for name, value in said.items() if name not in IN_THE_LINE}
    return [humanize.flags({**others, **start})] if others or start else []
