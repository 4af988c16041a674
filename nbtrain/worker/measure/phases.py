"""Measures where a rank's time goes: data, forward, backward, waiting for other ranks, the optimizer, and the rest.

A plain loop does not say where its forward begins, and hooks in every module would cost more than they tell. So there
are marks at what is replaced in torch anyway: a loader's `__next__`, `backward`, an optimizer's `step`, collectives.
What lies between a batch and a backward is forward. What follows a backward or a step is not known at once: when
another backward follows it was a forward (a loop without a loader, a GAN's second half); when a batch, a step or the
cell's end follows it was the rest. Until then it is in neither.

On a GPU the host is far ahead of the card, so there the marks are events of the card, read when the card has passed
them; nothing waits for it. (The marks of a GPU have been tried with a clock that stands for one, and on no card.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch

from nbtrain.base.events import PHASES

DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, REST, UNDECIDED, OUTSIDE = range(8)
"""The first are those of PHASES. UNDECIDED: after a backward or a step. OUTSIDE: before the first mark of a cell."""
NOTHING: list[float] = [0.0] * 8


class CardClock:
    """Time marks in a card's queue, read when the card has passed them."""

    def __init__(self, make: Callable[[], Any], apart: Callable[[], bool] = lambda: False) -> None:
        """`make`: returns a torch.cuda.Event, or what stands for one. `apart`: whether what is done now is recorded to
        be run later, as a graph: it takes no time, and no marks."""
        self._make = make
        self._apart = apart
        self._free: list[Any] = []
        self._queue: deque[tuple[int, Any]] = deque()
        self._before: Any = None
        self._at = 0.0
        self._last: tuple[Any, float] | None = None

    def clear(self) -> None:
        self._free += [mark for _, mark in self._queue]
        self._queue.clear()
        self._before = self._last = None

    def put(self, phase: int) -> None:
        if self._apart():
            return
        mark = self._free.pop() if self._free else self._make()
        mark.record()
        self._queue.append((phase, mark))
        self._last = mark, time.perf_counter()

    def passed(self) -> Iterator[tuple[int, float]]:
        """Phases that have begun since the last call, and when."""
        while self._queue and self._queue[0][1].query():
            phase, mark = self._queue.popleft()
            if self._before is not None:
                self._at += max(0.0, self._before.elapsed_time(mark)) / 1000
                self._free.append(self._before)
            self._before = mark
            yield phase, self._at

    def idle(self) -> float:
        """About how long it has been idle since the last mark; from any thread."""
        last = self._last
        return time.perf_counter() - last[1] if last is not None and last[0].query() else 0.0


def card_of(device: torch.device) -> CardClock | None:
    if device.type != "cuda":
        return None
    return CardClock(lambda: torch.cuda.Event(enable_timing=True), torch.cuda.is_current_stream_capturing)


class PhaseTimer:
    """Times the phases of a cell on a rank. `begin` and `end` around it; marks of other threads do not count."""

    def __init__(self, card: CardClock | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._card = card
        self._clock = clock
        self._thread = 0
        self._known = False
        self._state: tuple[list[float], int, float] = (NOTHING, OUTSIDE, 0.0)
        """seconds in each, where it is, and since when: replaced as a whole, and so read as a whole"""
        self._said = NOTHING[: len(PHASES)]
        self.now = OUTSIDE
        self.backwards = 0
        self.on_phase: Callable[[int], None] | None = None
        """called with each phase that begins, but not when waiting ends"""

    def begin(self, known: bool) -> None:
        """`known`: the cell has a model. Without one, a loader's batches are for nobody knows what, until there is a
        backward or a step."""
        self._thread, self._known = get_ident(), known
        self.now, self.backwards = OUTSIDE, 0
        self._said = NOTHING[: len(PHASES)]
        if self._card is None:
            self._state = NOTHING, OUTSIDE, self._clock()
        else:
            self._card.clear()
            self._state = NOTHING, OUTSIDE, self._state[2]
        self._mark(OUTSIDE)

    def end(self) -> None:
        self._mark(OUTSIDE)
        self._thread = 0

    def mark(self, phase: int) -> int:
        """A phase begins. Returns the one before."""
        before = self.now
        if get_ident() != self._thread:
            return before
        if not self._known:
            if phase != BACKWARD and phase != OPTIMIZER:
                return before
            self._known = True
        if phase == BACKWARD:
            self.backwards += 1
        self._mark(phase)
        if self.on_phase is not None:
            self.on_phase(phase)
        return before

    def wait(self) -> int:
        """Waiting for other ranks begins. Returns what to pass to `resume` afterwards."""
        before = self.now
        if self._known and get_ident() == self._thread:
            self._mark(COMMUNICATION)
        return before

    def resume(self, phase: int) -> None:
        if self._known and get_ident() == self._thread:
            self._mark(phase)

    def _mark(self, phase: int) -> None:
        self.now = phase
        if self._card is None:
            self._begins(phase, self._clock())
            return
        self._card.put(phase)
        if phase in (DATA, BACKWARD, OUTSIDE):  # once or twice a step: what the card has passed by then
            for earlier, at in self._card.passed():
                self._begins(earlier, at)

    def _begins(self, phase: int, at: float) -> None:
        spent, current, since = self._state
        spent = spent[:]
        spent[current] += at - since
        if phase <= REST and phase != COMMUNICATION and spent[UNDECIDED]:
            self._decide(spent, FORWARD if phase == BACKWARD else REST)
        elif phase == OUTSIDE and current != COMMUNICATION:
            self._decide(spent, REST)
        self._state = spent, phase, at

    @staticmethod
    def _decide(spent: list[float], phase: int) -> None:
        spent[phase] += spent[UNDECIDED]
        spent[UNDECIDED] = 0.0

    def seconds(self) -> tuple[float, ...]:
        """Of each of PHASES since the cell began, none ever less than before. From any thread: the phase that is under
        way counts as far as it has come."""
        spent, phase, since = self._state
        seconds = spent[: len(PHASES)]
        if self._card is None:
            if phase < len(PHASES):
                seconds[phase] += self._clock() - since
        elif self.now < len(PHASES):
            seconds[self.now] += self._card.idle()
        # The cell's thread may have looked at the clock for its next mark just before this one has.
        self._said = [max(pair) for pair in zip(self._said, seconds, strict=True)]
        return tuple(self._said)

    def word(self, loading: bool) -> str:
        """What the rank is in. `loading`: a loader is under way, so that a step is followed by the rest."""
        phase = self.now
        if phase == UNDECIDED:
            phase = REST if loading else FORWARD
        return "" if phase == OUTSIDE else PHASES[phase]
