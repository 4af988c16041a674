"""`--log-to NAME`: passes metrics, as they come, to TensorBoard's writer or anything else with `add_scalar`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbtrain.base.events import Event, Metrics

EVERY = 1.0
"""seconds between two calls of the writer"""


class LogTo:
    """A Sink. Where several ranks log the same name, `loss` is the lowest rank's and `loss/rank1` the next one's. What
    the writer raises is said once, and the run goes on without it."""

    def __init__(self, writer: Any, say: Callable[[str], object] = print) -> None:
        self._writer: Any = writer
        self._say = say
        self._gathered: list[Metrics] = []
        self._plain: dict[str, int] = {}
        """name → the rank whose tag has no suffix"""
        self._next: float | None = None

    def opened(self, summary: str) -> None:
        pass

    def receive(self, event: Event) -> None:
        if isinstance(event, Metrics) and self._writer is not None:
            self._gathered.append(event)

    def tick(self, now: float) -> None:
        if self._next is None:
            self._next = now + EVERY
        elif now >= self._next:
            self._next = now + EVERY
            self._hand_over()

    def closed(self, ok: bool, text: str = "", *, killed: bool = False) -> None:
        self._hand_over()
        if callable(flush := getattr(self._writer, "flush", None)):
            self._do(flush)
        self._writer = None

    def _hand_over(self) -> None:
        gathered, self._gathered = self._gathered, []
        for event in sorted(gathered, key=lambda event: event.rank):
            for name in event.points:
                self._plain.setdefault(name, event.rank)
        for event in gathered:
            for name, points in event.points.items():
                tag = name if self._plain[name] == event.rank else f"{name}/rank{event.rank}"
                for step, value in points:
                    if self._writer is not None:
                        self._do(self._writer.add_scalar, tag, value, step)

    def _do(self, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # the writer must not end the run
            kind = type(self._writer).__name__
            self._writer = None
            self._say(f"nbtrain: --log-to gets nothing more of this run: {kind} raised {type(error).__name__}: {error}")
