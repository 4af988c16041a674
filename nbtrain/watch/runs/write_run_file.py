"""Writes a file for each run, which can be read when it is over, and after the kernel has died.

    {"run": {settings}}                                   the first line
    {"at": 3.0, "metrics": {"0": {"loss": [[step, value], …]}}, "memory": {"0": {"": [[seconds, …], …]}}, …}
    {"at": 9.1, "end": {"how": "done", "text": ""}, "figures": {…}}       the last line, if there is one

`at` is in seconds since the run began; run_rows.py has the columns. Numbers that are not finite are strings, so that
each line is JSON.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import platform
import re
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nbtrain.base.events import Event, Failed, Finished, Metrics, RankState
from nbtrain.base.humanize import plain
from nbtrain.base.specs import RunSpec, asked
from nbtrain.watch.runs import run_folder
from nbtrain.watch.runs.run_rows import FORMAT, JUDGED, METRICS, Totals, rows
from nbtrain.watch.runs.thinning import Key, Row, Thinner

METRIC_BYTES, OTHER_BYTES = 5_500_000, 2_000_000
"""bytes of a file, about, at most"""
SERIES = 2048
"""series of each, at most: one per name and rank"""
_SHELL = re.compile(r"^(\s*)[%!?]")
"""A line with a magic or a shell command."""
_QUOTES = ("'", '"', "")
_OURS = "nbtrain_"
WRITE_EVERY = 1.0
PULSE_EVERY = 10.0
"""seconds after which a line is written even without news, so that it is known when a kernel died"""
WORTH = 2.0
"""seconds: a shorter cell that logs nothing and trains nothing is not kept"""

_said: set[str] = set()
"""folders that cannot be written, of which the user was told"""


def settings(
    spec: RunSpec, *, source: str, number: int | None, kernel: str = "", namespace: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The first line of a run's file. `source`, `number`: the cell's. `namespace`: the notebook's."""
    pool = spec.pool
    return {
        "format": FORMAT,
        "notebook": run_folder.notebook(namespace or {}),
        "kernel": kernel or run_folder.kernel(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cell": number,
        "source": telling_line(source)[:200],
        "hash": hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        "strategy": spec.strategy,
        "precision": spec.precision,
        "world_size": pool.world_size,
        "devices": list(pool.devices),
        "ranks": None if spec.ranks is None else list(spec.ranks),
        "engine": pool.engine,
        "start": pool.start,
        "nodes": pool.nodes,
        "options": {name: plain(value) for name, value in spec.options.items()},
        "asked": {name: plain(value) for name, value in asked(spec).items()},
        "versions": {"python": platform.python_version(), "nbtrain": _version("nbtrain"), "torch": _version("torch")},
    }


def telling_line(source: str) -> str:
    """The first line of a cell that says what it does: no import, comment, magic or docstring. The first line of all
    if there is no other, or if it begins with a name of ours: what we write for `nbtrain.run` or a script has a title.
    """
    lines = source.strip().split("\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks compile it too and will warn
            body = ast.parse("\n".join(_SHELL.sub(r"\1pass  #", line) for line in lines)).body
    except (SyntaxError, ValueError):
        return lines[0]
    told = (statement.lineno for statement in body if not isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass))
    found = next((lines[at - 1] for at in told if lines[at - 1].strip()[:1] not in _QUOTES), lines[0])
    return lines[0] if found.removeprefix("with ").startswith(_OURS) else found


class Recorder:
    """A Sink that writes the file. It never ends a run: an error is said once, and the run goes on."""

    def __init__(
        self, settings: Callable[[], dict[str, Any]], folder: Path | None = None, say: Callable[[str], object] = print
    ) -> None:
        """`settings` and the folder are asked for when there is something to write, as for most cells there is not.
        `folder`: another one than NBTRAIN_HISTORY names."""
        self._asked = settings
        self._summary = ""
        self._folder = folder
        self._say = say
        self._open = True
        self._file: int | None = None
        self.path: Path | None = None
        """the file, once there is anything worth keeping"""
        self._began = time.time()
        self._metrics = Thinner(METRIC_BYTES, SERIES)
        self._others = Thinner(OTHER_BYTES, SERIES)
        self._totals = Totals()
        self._notes: tuple[str, ...] = ()
        self._died: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._worth = False
        self._now = self._next = self._pulse = 0.0
        self._since: float | None = None
        """the first tick, which comes when the cell begins, by the clock of ticks"""
        self._ended: float | None = None
        self._ticking = math.inf
        """the same by `time.time`"""

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return self._asked()

    def opened(self, summary: str) -> None:
        self._began = time.time()
        self._summary = summary or self._summary

    def receive(self, event: Event) -> None:
        if not self._open:
            return
        for kind, name, new_rows in rows(event, self._began):
            self._totals.add(kind, event.rank, name, new_rows)
            thinner = self._metrics if kind == METRICS else self._others
            thinner.add((kind, event.rank, name), new_rows, JUDGED[kind])
        if isinstance(event, Finished | Failed):
            self._totals.finished(event)
        if isinstance(event, RankState):
            if event.state == "running":
                self._notes = self._notes or event.notes
            elif event.state == "dead":
                self._died[event.rank] = f"rank {event.rank} died"
        elif isinstance(event, Failed) and not event.interrupted:
            several = self._settings.get("world_size") != 1
            self._failed[event.rank] = f"{event.name} on rank {event.rank}" if several else event.name
        self._worth = self._worth or isinstance(event, Metrics) or self._totals.steps > 0

    def tick(self, now: float) -> None:
        if not self._open:
            return
        if self._since is None:
            self._since, self._ticking = now, time.time()
        elapsed = now - self._since
        self._worth = self._worth or elapsed >= WORTH
        if self._worth and elapsed >= self._next:
            self._next = elapsed + WRITE_EVERY
            self._write({}, pulse=elapsed)

    def ranks_ended(self) -> None:
        """What they did comes home later, and that is no time of theirs."""
        self._ended = time.time()

    def closed(self, ok: bool, text: str = "", *, killed: bool = False) -> None:
        """`text`: what it raised, where that says more than the events. `killed`: the user has ended its ranks."""
        if not self._open:
            return
        try:
            if self._worth or time.time() - self._ticking >= WORTH:
                # Where a rank has died, those that waited for it fail, too.
                causes = self._died or self._failed
                failed = causes[min(causes)] if causes else ""
                how = "done" if ok else "failed" if failed or text else "killed" if killed else "stopped"
                left_out = self._metrics.left_out + self._others.left_out
                end = {"how": how, "text": text or ("" if ok else failed)}
                self._write({"end": end, "figures": self._totals.figures(), "left_out": left_out}, end=True)
        finally:
            self._let_go()

    def _write(self, more: dict[str, Any], *, pulse: float = 0.0, end: bool = False) -> None:
        """Write the rows so far, and `more` in a line of its own, so that it is found without reading all."""
        at = round((self._ended or time.time()) - self._began, 3)
        parts = []
        for thinner in (self._metrics, self._others):
            text = _text(thinner.ready(end=end))
            thinner.written(len(text))
            parts.append(text)
        if not (end or any(parts) or pulse >= self._pulse):
            return
        self._pulse = pulse + max(PULSE_EVERY, pulse / 1000)
        try:
            if self._file is None:
                self._folder = folder = self._folder or run_folder.folder()
                if folder is None:
                    return self._let_go()
                self.path, self._file = run_folder.create(folder)
                said = {"summary": self._summary} if self._summary else {}
                head = {"run": {**self._settings, **said, "began": self._began, "notes": list(self._notes)}}
                self._put(json.dumps(_finite(head)) + "\n")
            if any(parts) or not more:
                self._put("{" + ", ".join([f'"at": {at}', *filter(None, parts)]) + "}\n")
            if more:
                self._put(json.dumps(_finite({"at": at, **more})) + "\n")
        except OSError as error:
            self._give_up(error)

    def _put(self, text: str) -> None:
        assert self._file is not None
        rest = memoryview(text.encode())
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _give_up(self, error: OSError) -> None:
        where = str(self._folder)
        if where not in _said:
            _said.add(where)
            why = error.strerror or str(error)
            self._say(
                f"nbtrain: the history of this run is not kept, and the run goes on: {where}: {why} "
                "(NBTRAIN_HISTORY names another folder; off keeps none)"
            )
        self._let_go()

    def _let_go(self) -> None:
        self._open = False
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                run_folder.release(file)


def _text(ready: Mapping[Key, list[Row]]) -> str:
    """`"metrics": {"0": {"loss": [[1, 0.5]]}}, "memory": …`; empty without rows."""
    kinds: dict[str, dict[str, dict[str, list[Row]]]] = {}
    for (kind, rank, name), new_rows in ready.items():
        kinds.setdefault(kind, {}).setdefault(str(rank), {})[name] = new_rows
    if not kinds:
        return ""
    try:
        return json.dumps(kinds, allow_nan=False, separators=(",", ":"))[1:-1]
    except ValueError:
        return json.dumps(_finite(kinds), separators=(",", ":"))[1:-1]


def _finite(value: Any) -> Any:
    """NaN and infinity as strings, which `float` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _version(package: str) -> str:
    module = sys.modules.get(package)
    version = getattr(module, "__version__", None)
    return str(version) if version is not None else _installed_version(package)


@cache
def _installed_version(package: str) -> str:
    """Read from the disk once: to parse torch's metadata takes 2,000 calls, more than all else in a warm cell."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
