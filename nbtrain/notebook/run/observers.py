"""Passes a run's events on: to the feed, the view below the cell, the history, a writer of the user's."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nbtrain.base.events import Event, RankState, Sink
from nbtrain.base.specs import RunSpec
from nbtrain.notebook.cell import Cell
from nbtrain.notebook.output.screens import CellScreen
from nbtrain.notebook.run.run_state import RunControls
from nbtrain.watch.feed.feed import Feed
from nbtrain.watch.feed.series import points
from nbtrain.watch.runs.write_run_file import Recorder, settings
from nbtrain.watch.views import choose

Finite = int | float
"""what is not finite is None or a word"""


class Observers:
    """Observers of one run. All calls come from the one thread that watches the run."""

    def __init__(
        self,
        shell: Any,
        spec: RunSpec,
        cell: Cell,
        controls: RunControls | None,
        kernel: str,
        say: Callable[[str], object],
        screen: CellScreen,
    ) -> None:
        """`controls`: what the view's buttons do; None where there are none. `kernel`: its id, as the server knows it.
        `say` tells the user something. `screen`: where the view is shown."""
        self.feed = Feed(
            {
                "id": uuid.uuid4().hex,
                "cell": cell.number,
                "summary": "",
                "strategy": spec.strategy,
                "devices": [spec.pool.where] if spec.pool.together else list(spec.pool.devices),
                "began": time.time(),
                "kernel": kernel,
                "pid": os.getpid(),
                "background": spec.background,
                "machines": spec.pool.nodes if spec.pool.machines is not None else 1,
            }
        )
        self.view = choose(spec.monitor, shell, self.feed, controls, screen)
        self._others: list[Sink] = []
        self._recorder: Recorder | None = None
        if spec.trial is None:
            recorded = partial(settings, spec, source=cell.source, number=cell.number, kernel=kernel)
            self._recorder = Recorder(partial(recorded, namespace=shell.user_ns), say=say)
            self._others.append(self._recorder)
        if spec.log_to:
            from nbtrain.watch.feed.log_to import LogTo

            self._others.append(LogTo(shell.user_ns[spec.log_to], say=say))
        self._dead: set[int] = set()

    @property
    def steps(self) -> int:
        return max((rank.steps for rank in list(self.feed.figures.ranks.values())), default=0)

    def shows_through(self, comm: str) -> bool:
        """Whether this comm is the dashboard's."""
        return bool(comm) and getattr(self.view, "comm_id", None) == comm

    def metrics(self) -> dict[str, list[tuple[float, float]]]:
        """name → (step, value) pairs of the lowest rank that logged it."""
        finite: dict[str, list[tuple[float, float]]] = {}
        for rank in list(self.feed.figures.ranks.values()):
            for name, series in list(rank.metrics.items()):
                pairs = zip(*points(series), strict=True)
                finite.setdefault(name, [(x, y) for x, y in pairs if isinstance(x, Finite) and isinstance(y, Finite)])
        return finite

    def opened(self, summary: str) -> None:
        """The cell begins on the ranks; `summary` is the run's first line. Without one the cell was sent to them, and
        they may have to start first."""
        self.feed.opened(summary)
        if summary:
            self.view.opened(summary)
        for sink in self._others:
            sink.opened(summary)

    def receive(self, event: Event) -> None:
        self.feed.receive(event)
        for sink in self._others:
            sink.receive(event)

    def dead(self, ranks: Sequence[int]) -> None:
        for rank in set(ranks) - self._dead:
            self._dead.add(rank)
            self.receive(RankState(rank=rank, time=time.time(), state="dead"))

    def tick(self, now: float) -> None:
        self.feed.tick(now)
        self.view.tick(now)
        for sink in self._others:
            sink.tick(now)

    def ranks_ended(self) -> None:
        """What they did comes home later: until then nothing more happens."""
        self.tick(now := time.monotonic())
        self.feed.ranks_ended(now)
        if self._recorder is not None:
            self._recorder.ranks_ended()

    def closed(self, ok: bool, text: str = "", killed: bool = False, at_home: str = "") -> None:
        """`text`: what the run raised, if anything. `killed`: the user has ended its ranks. `at_home`: what failed
        after they had all done the cell."""
        if self.feed.ended is not None:
            return
        self.feed.closed(ok, text, killed, failed=bool(at_home))
        self.view.closed(ok)
        for sink in self._others:
            sink.closed(ok, at_home, killed=killed)
