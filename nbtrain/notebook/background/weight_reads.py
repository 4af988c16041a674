"""Gives cells that read what a run in the background trains the weights of the last finished step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import nbtrain.machine.registry as registry
from nbtrain.base.humanize import listed
from nbtrain.base.keyboard_interrupts import shielded
from nbtrain.base.specs import RunSpec
from nbtrain.exchange.graph.object_path import find_all
from nbtrain.exchange.names.cell_names import analyse, reach
from nbtrain.notebook.run.cell_run import CellRun

LONG = 10.0
"""Seconds that a cell waits for a step to end."""
SLOW = 1.0
"""Seconds after which it says what it is waiting for."""


class WeightReads:
    """Gives cells the weights of one run; made once the run has been sent to the ranks."""

    def __init__(self, run: CellRun) -> None:
        from torch import nn
        from torch.optim import Optimizer
        from torch.optim.lr_scheduler import LRScheduler

        from nbtrain.worker.checkpoints.live_weights import LiveWeights

        self._run = run
        self._said: set[str] = set()
        self._namespace = run.shell.user_ns
        side, pool = run.ranks.notebook_side, run.ranks.pool
        assert side is not None
        assert pool is not None
        names = {name: self._namespace[name] for name in (*run.names.hard, *run.names.soft) if name in self._namespace}
        kinds = (nn.Module, Optimizer, LRScheduler)
        objects = find_all(side.table, names, kinds)
        self._live_weights = LiveWeights(pool.board, run.number, run.weights_folder, objects)
        leads = [value for value in names.values() if find_all(side.table, {"it": value}, kinds)]
        self._trained: dict[int, Any] = {id(value): value for value in (*leads, *objects.values())}
        """what the run trains, and what leads to it"""

    def provide(self, code: str, over: Callable[[], bool]) -> None:
        """Called before the cell runs. `over`: the run has ended, and its work is about to come home."""
        names = self._read(code)
        if not names:
            return
        if why := why_not(self._run.spec, self._namespace):
            self._once("left", f"nbtrain: {listed(names)}: as the notebook has them while the run goes on; {why}")
            return
        if self._live_weights.stand_still():
            return
        step = self._live_weights.ask()
        began, told = time.monotonic(), False

        def enough() -> bool:
            nonlocal told
            waited = time.monotonic() - began
            if waited > SLOW and not told:
                told = True
                print(f"nbtrain: {listed(names)}: waiting for the run in the background to finish its step …")
            return over() or waited > LONG

        try:
            there = self._live_weights.fetch(enough)
        except Exception as error:  # reading must not end the run
            print(f"nbtrain: the run's weights could not be read: {type(error).__name__}: {error}")
            return
        if there and not over():
            self._once(
                "read",
                f"nbtrain: {listed(names)}: as after step {step:,} of the run that goes on in the background; every "
                "cell that reads them gets the last finished step's (said once)",
            )
        elif not over():
            print(
                f"nbtrain: no step has ended for {LONG:.0f} s; {listed(names)}: as the notebook has them. Until one "
                "does, cells do not wait"
            )

    def put_back(self) -> None:
        """Restore what the notebook had before anything was read."""
        with shielded():
            self._live_weights.close()

    def _once(self, kind: str, sentence: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            print(sentence)

    def _read(self, code: str) -> list[str]:
        """Names below which this cell reads what is trained, by itself or through functions of the notebook."""
        try:
            names = reach(analyse(code), self._namespace)
        except (SyntaxError, ValueError, RecursionError):
            return []
        return [name for name in (*names.hard, *names.soft) if id(self._namespace.get(name)) in self._trained]


def why_not(spec: RunSpec, namespace: dict[str, Any]) -> str:
    """Why the weights of such a run come home when it ends, and not before."""
    if spec.pool.machines is not None:
        return "on several machines they come home when it ends"
    if spec.ranks is not None and len(spec.ranks) < spec.pool.world_size:
        return "weights are read from all ranks, and %%rank runs it on some"
    if spec.pool.world_size > 1 and registry.load_strategy(spec.strategy, namespace).facts.hands_off:
        return f"under -s {spec.strategy} nothing is known of what the ranks hold"
    return ""
