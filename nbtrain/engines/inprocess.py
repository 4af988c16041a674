"""One rank inside the kernel: breakpoints and debuggers work, and nothing is sent anywhere.

The cell runs on the notebook's own objects, as an ordinary cell does, so a failure leaves what it did so far.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbtrain.base.events import Event, Metrics
from nbtrain.base.specs import RankInfo, RunSpec


class InProcess:
    """Runs one cell in the kernel under a strategy, and puts everything back."""

    def __init__(self, info: RankInfo, strategy: Any) -> None:
        self.info = info
        self.strategy = strategy

    def run(
        self, spec: RunSpec, objects: Mapping[str, Any], body: Callable[[], None], emit: Callable[[Event], None]
    ) -> list[str]:
        """Run `body`; returns sentences for the user."""
        from nbtrain.worker.runtime import Runtime

        def log(step: int, values: Mapping[str, float]) -> None:
            points = {name: [(step, value)] for name, value in values.items()}
            emit(Metrics(rank=self.info.rank, time=time.time(), points=points))

        runtime = Runtime(self.info, self.strategy, log, precision=spec.precision)
        runtime.install()
        ok = False
        try:
            with _names(runtime.builtins()):
                notes = list(runtime.begin(spec, objects))
                body()
                runtime.checkpoints.finish()
            ok = True
        finally:
            try:
                ended = runtime.end(ok)
            finally:
                runtime.uninstall()
            if runtime.checkpoints.resumed and spec.resume is not None:  # a failure takes nothing back
                from nbtrain.worker.checkpoints import api

                api.resumed(spec.resume[0])
        return [*notes, *ended]


@contextmanager
def _names(names: Mapping[str, Any]) -> Iterator[None]:
    """Put a rank's names into builtins while the cell runs."""
    missing = object()
    before = {name: getattr(builtins, name, missing) for name in names}
    for name, value in names.items():
        setattr(builtins, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(builtins, name)
            else:
                setattr(builtins, name, value)
