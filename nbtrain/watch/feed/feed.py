"""Turns a run into JSON messages: for the widget, and for readers outside of the kernel.

A reader subscribes and asks for `everything`; from then on it adds the `news`. Messages are numbered, so that a reader
that has missed one asks again.
"""

from __future__ import annotations

import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from threading import RLock
from typing import Any

from nbtrain.base.events import Event
from nbtrain.watch.feed.run_statistics import Figures, unheard
from nbtrain.watch.feed.series import Series, number, points

EVERY = 0.095
"""seconds between two messages, at least; a little less than a tick, which is not always on time"""
SILENCE = 1.0
"""seconds between two messages, at most: readers set their clock by them"""
FEW = 32
"""buckets of one curve in one message; each is two points at most"""
NEWS = 4096
"""buckets of all curves in one message"""
ALL = 32768
"""buckets of all curves in the message that holds everything"""

Message = dict[str, Any]
Callback = Callable[[Message], None]


class Feed:
    """A Sink. Its calls come from the one thread that watches the run; `everything` and `subscribe` from any."""

    def __init__(self, run: Mapping[str, Any]) -> None:
        """`run`: what does not change: id, cell, summary, strategy, devices, began, kernel, pid, background, and on how
        many machines."""
        self.run = dict(run)
        self.figures = Figures(self.run.get("began"), tuple(self.run.get("devices", ())))
        self.ended: dict[str, str] | None = None
        self.homeward = False
        """all ranks have ended, and what they did has not come home yet"""
        self._lock = RLock()
        self._callbacks: list[Callback] = []
        self._outbox: list[Message] = []
        self._number = 0
        self._sent: float | None = None
        self._anew = False
        """`run` itself has changed"""
        self._touched: set[int] = set()
        """ranks with news"""
        self._rows: dict[int, dict[str, Any]] = {}
        """rank → its row as it was sent last"""
        self._progress: dict[str, Any] | None = None
        self._alerts: list[str] = []
        self._points: dict[str, Series] = {}
        """points that were added to curves since the last message"""

    # -- events --------------------------------------------------------------------------

    def opened(self, summary: str) -> None:
        """Called when the run begins, and again when the cell begins on the ranks: from then on it is timed."""
        with self._lock:
            self._anew = bool(self._callbacks)
            self.run |= {"summary": summary, "began": time.time()}
            self.figures.begin(self.run["began"])

    def receive(self, event: Event) -> None:
        with self._lock:
            self.figures.receive(event)
            self._touched.add(event.rank)

    def line(self, rank: int, text: str) -> None:
        """What a rank printed."""
        with self._lock:
            self.figures.of(rank).printed(text)
            self._touched.add(rank)

    def tick(self, now: float) -> None:
        with self._lock:
            self.figures.tick(now)
            if self.ended is None and self._callbacks and (self._sent is None or now - self._sent >= EVERY):
                self._collect()
                if not self._outbox and (self._sent is None or now - self._sent >= SILENCE):
                    self._post("news", ranks=[], points={})
        self._deliver(now)

    def ranks_ended(self, now: float) -> None:
        """What they did comes home later, and until then nothing more happens."""
        with self._lock:
            self.homeward = True
            self._collect()
            self._post("news", ranks=[], points={}, homeward=True)
        self._deliver(now)

    def closed(self, ok: bool, text: str = "", killed: bool = False, failed: bool = False) -> None:
        """`text`: what the run raised, if anything. `killed`: the user has ended its ranks. `failed`: it did although
        they did not."""
        with self._lock:
            self.figures.close(ok, killed, failed)
            self._collect()
            self.ended = {"how": self.figures.ending, "text": text}
            rows = [figures.row() for figures in self.figures.ranks.values()]
            figures = self.figures
            self._post("end", ended=self.ended, ranks=rows, points={}, progress=figures.progress, alerts=figures.alerts)
        self._deliver(self._sent)

    # -- messages ------------------------------------------------------------------------

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Call `callback` with every message from now on, in the thread that ticks; returns what ends that. Subscribe
        first and ask for `everything` then, which has what happens in between."""
        with self._lock:
            self._callbacks.append(callback)
            self.figures.point = self._point

        return lambda: self._unsubscribe(callback)

    def _unsubscribe(self, callback: Callback) -> None:
        with self._lock:
            self._callbacks = [other for other in self._callbacks if other is not callback]
            if not self._callbacks:
                self.figures.point = unheard
                self._points.clear()
                self._outbox.clear()

    def everything(self) -> Message:
        """The run until now. What has not been sent to subscribers yet becomes a message before it."""
        with self._lock:
            self._collect()
            series = self.figures.series()
            few = max(16, ALL // max(1, len(series)))
            return {
                "kind": "all",
                "seq": self._number,
                "run": dict(self.run),
                "now": number(self.figures.elapsed),
                "ranks": [figures.row() for figures in self.figures.ranks.values()],
                "progress": self.figures.progress,
                "alerts": self.figures.alerts,
                "series": {key: one_series.at_most(few).message() for key, one_series in series.items()},
                "ended": self.ended,
                "homeward": self.homeward,
            }

    def snapshot(self) -> bytes:
        """All that is known by now, for the `take` of a feed in another process of this machine."""
        with self._lock:
            told, self.figures.point = self.figures.point, unheard
            try:
                return pickle.dumps((self.run, self.figures, self.ended), 5)
            finally:
                self.figures.point = told

    def take(self, snapshot: bytes) -> None:
        """Know what another feed knew, and tell subscribers all of it."""
        run, figures, ended = pickle.loads(snapshot)
        with self._lock:
            self.run, self.ended = run, ended
            vars(self.figures).update(vars(figures))  # views have the object
            if self._callbacks:
                self._number += 1
                self._outbox.append(self.everything())
        self._deliver(self._sent)

    def _collect(self) -> None:
        """Make a message of all news, if there are any and somebody has subscribed."""
        if not self._callbacks or self.ended is not None:
            return
        if self._anew:
            self._anew = False
            self._clear()
            self._number += 1
            self._outbox.append(self.everything())
            return
        rows = [row for rank in sorted(self._touched) if len(row := self._changed(rank)) > 1]
        self._touched.clear()
        few = max(2, min(FEW, NEWS // max(1, len(self._points))))
        new_points = {key: [*points(series.at_most(few))] for key, series in self._points.items()}
        self._points = {}
        news: dict[str, Any] = {"ranks": rows, "points": new_points}
        progress = self.figures.progress
        if progress != self._progress:
            self._progress = news["progress"] = progress
        if (alerts := self.figures.alerts) != self._alerts:
            self._alerts = news["alerts"] = alerts
        if rows or new_points or len(news) > 2:
            self._post("news", **news)

    def _clear(self) -> None:
        self._touched.clear()
        self._points = {}
        self._rows = {rank: figures.row() for rank, figures in self.figures.ranks.items()}
        self._progress = self.figures.progress
        self._alerts = self.figures.alerts

    def _changed(self, rank: int) -> dict[str, Any]:
        before, row = self._rows.get(rank, {}), self.figures.of(rank).row()
        self._rows[rank] = row
        return {name: value for name, value in row.items() if name == "rank" or before.get(name, self) != value}

    def _point(self, key: str, points: Sequence[tuple[float, float]]) -> None:
        if key not in self._points:
            self._points[key] = Series(FEW)
        self._points[key].extend(points)

    def _post(self, kind: str, **content: Any) -> None:
        if self._callbacks:
            self._number += 1
            self._outbox.append({"kind": kind, "seq": self._number, "now": number(self.figures.elapsed), **content})

    def _deliver(self, now: float | None) -> None:
        with self._lock:
            messages, self._outbox = self._outbox, []
            callbacks = self._callbacks
        if messages:
            self._sent = now
        for callback in callbacks:
            try:
                for message in messages:
                    callback(message)
            except Exception as error:  # a reader must never be able to end a training
                self._unsubscribe(callback)
                warnings.warn(f"one observer of this run gets no more updates: {error!r}", RuntimeWarning, stacklevel=2)
