"""Reads a run's file, also one that is being written, or whose kernel has died."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from nbtrain.watch.runs import run_folder
from nbtrain.watch.runs.run_rows import COLUMNS, FORMAT, METRICS, Totals
from nbtrain.watch.runs.thinning import Row

TAIL = 65_536
"""bytes at the end in which the last line is looked for"""
TAKEN = ("run", "rank", "step")
"""a metric with such a name gets an underscore behind it as a column, `step_`"""


class UnreadableRecord(Exception):
    """It is not a file of nbtrain's, or of a later version."""


class RunRecord:
    """One run's file. It is read as a whole only when rows are asked for, or totals that its last line would have."""

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.path = path
        written = run_folder.is_written(path)  # before reading: a run that ends meanwhile has its last line
        self._first, self._size, final = _ends(path)
        self.settings = _settings(self._first, path)
        self._final = final if "end" in final else None
        final = self._final or {}
        end = final.get("end") or {"how": "running" if written else "lost", "text": ""}
        self.how: str = end["how"]
        """done, stopped, killed, failed, lost or running"""
        self.text: str = end["text"]

    @property
    def seconds(self) -> float:
        """How long it took; for a lost run, until its last line."""
        return self._end[0]

    @property
    def figures(self) -> dict[str, Any]:
        """Its totals."""
        return self._end[1]

    @cached_property
    def _end(self) -> tuple[float, dict[str, Any]]:
        if self._final is not None:
            seconds, figures = self._final["at"], self._final["figures"]
        else:
            seconds, figures = _summed(self.path, self._first, self._size)
        return seconds, {**figures, "last": {name: float(value) for name, value in figures["last"].items()}}

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """All lines but the first."""
        with open(self.path, encoding="utf-8") as file:
            return [line for text in file if "run" not in (line := _parsed(text)) and line]

    def rows(self, kind: str) -> Iterator[tuple[int, str, list[Row]]]:
        """(rank, name, rows) as they were written; `name` is a metric's."""
        for line in self.lines:
            yield from _rows(line, kind)

    def table(self, kind: str) -> list[dict[str, Any]]:
        """One dict for each measurement: rank, seconds, and the values."""
        names = COLUMNS[kind]
        table_rows = [
            {"rank": rank, **dict(zip(names, row, strict=False))} for rank, _, rows in self.rows(kind) for row in rows
        ]
        return sorted(table_rows, key=lambda row: row["rank"])

    def metrics(self) -> list[dict[str, Any]]:
        """One dict for each rank and step, with what was logged in it; more where a name was logged more than once."""
        by_step: dict[tuple[int, int, int], dict[str, Any]] = {}
        times: dict[tuple[int, str], tuple[int, int]] = {}
        for rank, name, rows in self.rows(METRICS):
            for step, value in rows:
                assert step is not None
                before, time = times.get((rank, name), (-1, 0))
                time = time + 1 if before == step else 0
                times[rank, name] = int(step), time
                key = rank, int(step), time
                there = by_step.setdefault(key, {"rank": rank, "step": int(step)})
                there[f"{name}_" if name in TAKEN else name] = value
        return [by_step[key] for key in sorted(by_step)]

    @property
    def kept(self) -> tuple[int, int]:
        """How many logged values are kept, and how many there were."""
        there = sum(len(rows) for _, _, rows in self.rows(METRICS))
        return there, max(there, self.figures["logged"])


@lru_cache(maxsize=run_folder.RUNS)
def _summed(path: Path, first: bytes, size: int) -> tuple[float, dict[str, Any]]:
    """Of a file without a last line, as its run goes on or its kernel has died: seconds until the last whole line, and
    the totals. Read again where it has grown (`size`), or is another run's that got the number (`first`)."""
    seconds, totals = 0.0, Totals()
    with suppress(OSError), open(path, "rb") as file:
        for line in map(_parsed, file.read(size).splitlines()):
            seconds = max(seconds, line.get("at", 0.0))
            for kind in COLUMNS:
                for rank, name, rows in _rows(line, kind):
                    if rows:
                        totals.add(kind, rank, name, rows)
    return seconds, totals.figures()


def read_record(number: int, path: Path, wanted: Callable[[Mapping[str, Any]], bool]) -> RunRecord | None:
    """None where its settings are not `wanted`, for which one line is read; where it was just removed, or is no run."""
    with suppress(OSError, UnreadableRecord):
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            first = file.readline()
        if wanted(_settings(first, path)):
            return RunRecord(number, path)
    return None


def newest_first(wanted: Callable[[Mapping[str, Any]], bool]) -> Iterator[RunRecord]:
    """The runs whose settings are `wanted`. Each is read when it is its turn."""
    where = run_folder.folder()
    for number, path in reversed(run_folder.files(where) if where is not None else []):
        if (record := read_record(number, path, wanted)) is not None:
            yield record


def _settings(first: bytes, path: Path) -> dict[str, Any]:
    settings = _parsed(first).get("run")
    if not isinstance(settings, dict) or settings.get("format") != FORMAT:
        raise UnreadableRecord(str(path))
    return settings


def _ends(path: Path) -> tuple[bytes, int, dict[str, Any]]:
    """The first line, bytes, and what the last line says."""
    with open(path, "rb") as file:
        first = file.readline()
        size = file.seek(0, os.SEEK_END)
        file.seek(max(len(first), size - TAIL))
        tail = file.read().splitlines()
    return first, size, _parsed(tail[-1]) if tail else {}


def _parsed(text: str | bytes) -> dict[str, Any]:
    """The line's JSON; empty where it was cut off."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _rows(line: Mapping[str, Any], kind: str) -> Iterator[tuple[int, str, list[Row]]]:
    for rank, names in line.get(kind, {}).items():
        for name, rows in names.items():
            yield int(rank), name, [_numbers(row) for row in rows]


def _numbers(row: list[Any]) -> Row:
    """The row with NaN and infinity, which were written as text, as floats."""
    return [float(value) if isinstance(value, str) else value for value in row]
