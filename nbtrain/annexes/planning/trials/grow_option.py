"""`%%distributed --grow 1,2,4,8`: measures the cell's loop on a few ranks and predicts many on several nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nbtrain.annexes.planning.trials import trial_options
from nbtrain.base.errors import NbtrainError, UsageError
from nbtrain.machine import host
from nbtrain.notebook.magics.line.parse import Given, Request
from nbtrain.notebook.magics.line.resolve import Chosen
from nbtrain.notebook.magics.line.values import DeviceSpec
from nbtrain.notebook.magics.state import MagicsState

if TYPE_CHECKING:
    from nbtrain.annexes.planning.compare.measured_way import MeasuredWay
    from nbtrain.annexes.planning.growth.growth import MeasuredStep, Volume
    from nbtrain.base.specs import RunSpec
    from nbtrain.notebook.cell import Cell

BANDWIDTH = 25e9
"""Bytes a second between nodes unless `--bandwidth` is given: one card of 200 Gbit/s."""


def grow(state: MagicsState, line: Request, base: Request, cell: Cell) -> None:
    """Measure, fit and show."""
    trial_options.begin(state, line, base)
    from nbtrain.annexes.planning.growth.growth import fit
    from nbtrain.annexes.planning.growth.growth_table import GrowthForecast
    from nbtrain.machine import devices

    request = line.over(base)
    counts = request.value("grow")
    ways = []
    for count in counts:
        devices_option = {"devices": Given(DeviceSpec(count), f"--devices {count}")}
        ranks = f"{count} rank{'s' * (count > 1)}"
        way = trial_options.way(state, ranks, replace(line, given={**line.given, **devices_option}), base)
        ways.append(replace(way, keeps_name=True))
    # The same number of threads for each, or the speed of torch's threads would be measured.
    threads = devices.threads_per_rank(max(counts), host.cores_allowed())
    question = replace(trial_options.question(request), goal="growth", threads=threads)
    found = trial_options.show(state, cell, ways, question)
    done = [at for at, row in enumerate(found.rows) if row.state == "done"]
    if len(done) < 2:
        raise UsageError("growth is fitted on two counts of ranks or more, and fewer than that have worked here")
    spec = ways[done[-1]].spec()
    volume = _volume(state, cell, spec)
    growth = fit([_point(counts[at], found.rows[at], spec, threads) for at in done], volume)
    forecast = GrowthForecast.of(growth, request.value("bandwidth") or BANDWIDTH)
    trial_options.LiveOutput(state.shell).show(forecast, over=True)


def _point(count: int, row: MeasuredWay, spec: RunSpec, threads: int) -> MeasuredStep:
    from nbtrain.annexes.planning.growth.growth import MeasuredStep

    cores = host.cores_allowed() if spec.pool.kind == "cpu" else 0
    return MeasuredStep(
        ranks=count,
        seconds=row.step,
        samples=row.samples_per_second / row.steps_per_second,
        cores=cores,
        threads=threads if cores else 1,
    )


def _volume(state: MagicsState, cell: Cell, spec: RunSpec) -> Volume:
    """Bytes that a rank sends in a step: by the strategy's estimate, or else as in a ring. 0, which is said, where the
    model is made in the cell, or cannot be profiled."""
    from nbtrain.annexes.planning.growth.growth import ring
    from nbtrain.annexes.planning.profile.model_and_batch import find_model_and_batch
    from nbtrain.annexes.planning.profile.profile import profile
    from nbtrain.exchange.names.name_order import NameOrder
    from nbtrain.notebook.sync.captured_names import captured
    from nbtrain.strategies.memory_estimate import World

    read = captured(cell, state.notebook, NameOrder(state.notebook))
    try:
        found = find_model_and_batch({name: state.notebook[name] for name in (*read.hard, *read.soft)})
        told = profile(found.model, found.batch, found.optimizer, precision=spec.precision)
        strategy = Chosen.named(spec.strategy, state.notebook).load()
    except NbtrainError:
        return ring(0)
    asked = strategy(strategy.Options(**spec.options))

    def volume(ranks: int) -> float:
        try:
            estimate = asked.estimate(told, World(ranks=ranks, kind=spec.pool.kind, precision=spec.precision))
        except Exception:  # a strategy of the user's
            estimate = None
        return float(estimate.sent) if estimate is not None else ring(told.gradients)(ranks)

    return volume
