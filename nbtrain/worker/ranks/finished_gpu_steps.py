"""Whether the steps that a rank has counted are done on its GPU, too.

A rank's code runs ahead of its GPU: it counts a step when it has asked for it. What it has asked for may wait there for
other ranks, and if one of those raises, or dies, collectives are given up: then the GPU goes on, with what nobody has
sent. So an event is put behind each step, and before collectives are given up somebody looks whether it was reached;
and a cell has ended when the GPU has done all that it was asked for.

Where machines come and go (`--nodes MIN:MAX`) a rank waits for its GPU before each step of an optimizer, so that the
last step is never one that was cut short.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbtrain.worker.loop.steps import Steps
from nbtrain.worker.parts import Cell, Part

SOON = 0.0002
"""Seconds between two looks at the GPU."""


class GivenUp(RuntimeError):
    """Collectives were given up while a rank waited for its GPU, between two steps."""

    def __init__(self) -> None:
        super().__init__("other ranks will not come: collectives were aborted")


class CardSteps(Part):
    """Of one rank of several, on a GPU."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self._behind: Any = None
        """the event behind the last step"""
        self._hook: Any = None
        self.given_up = False
        """collectives of this cell were, or are about to be"""
        self._looked = False
        """at what the GPU had done by then"""
        self.cut = False
        """the last step was not done by then: what the rank has is no step's"""

    def begin(self, cell: Cell) -> None:
        self.start(waits=cell.run.elastic)
        self.steps.noted = self.after_each(self.steps.noted)

    def start(self, waits: bool) -> None:
        """A cell begins. `waits`: for the GPU, before each step of an optimizer."""
        self.end(False)
        self.given_up = self._looked = self.cut = False
        self._behind = None
        if waits:
            self._hook = register_optimizer_step_pre_hook(self._before_step)

    def end(self, ok: bool) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def after_each(self, then: Callable[[], None]) -> Callable[[], None]:
        """What is to be called after each step of an optimizer, `then` included."""

        def stepped() -> None:
            if not torch.cuda.is_current_stream_capturing():
                self._behind = _event_behind_all()
            self.cut = self.cut or self.given_up  # it may have been freed in the middle of that very step
            then()

        return stepped

    def give_up(self) -> None:
        """Collectives are about to be given up. From any thread. It is said before somebody looks, and a step puts its
        event before it asks: so one of the two sees the other."""
        self.given_up = True
        with suppress(RuntimeError):  # the GPU can be used no more, as its own error tells
            self.cut = self.cut or not self._reached(self._behind)
        self._looked = True

    def settle(self, seconds: float | None = None) -> bool:
        """Wait until the GPU has done all that it was asked for. False: collectives were given up meanwhile, or it has
        taken so many `seconds`."""
        event = _event_behind_all()
        late = None if seconds is None else time.monotonic() + seconds
        while not self.given_up and not self._reached(event):
            if late is not None and time.monotonic() > late:
                self.cut = self.cut or not self._reached(self._behind)
                return False
            time.sleep(SOON)
        while self.given_up and not self._looked:
            time.sleep(SOON)
        return not self.given_up

    def _before_step(self, *_: Any) -> None:
        if not torch.cuda.is_current_stream_capturing() and not self.settle():
            raise GivenUp

    def _reached(self, event: Any) -> bool:
        return event is None or bool(event.query())


def _event_behind_all() -> torch.cuda.Event:
    """An event that is reached when the GPU has done all that it was asked for until now."""
    event = torch.cuda.Event()
    event.record()
    return event
