"""Reads a run's file, also one that is being written, or whose kernel has died."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from nbtrain.runs import run_folder
from nbtrain.runs.run_rows import COLUMNS, METRICS, Totals
from nbtrain.runs.thinning import Row

TAIL = 65_536
"""bytes at the end in which the last line is looked for"""
TAKEN = ("run", "rank", "step")
"""a metric with such a name gets an underscore behind it as a column, `step_`"""


class UnreadableRecord(Exception):
    """It is not a file of nbtrain's, or of a later version."""


class RunRecord:
    """One run's file. It is read as a whole only when rows are asked for, or when its last line is missing."""

    def __init__(self, number: int, path: Path) -> None:
        self.number = number
        self.path = path
        written = run_folder.is_written(path)  # before reading: a run that ends meanwhile has its last line
        first, final = _ends(path)
        if not isinstance(first.get("run"), dict):
            raise UnreadableRecord(str(path))
        self.settings: dict[str, Any] = first["run"]
        end = final if "end" in final else None
        if end is None:
            figures = self._totals.figures()
            end = {"at": self._at, "end": {"how": "running" if written else "lost", "text": ""}, "figures": figures}
        self.how: str = end["end"]["how"]
        """done, stopped, killed, failed, lost or running"""
        self.text: str = end["end"]["text"]
        last = {name: float(value) for name, value in end["figures"]["last"].items()}
        self.figures: dict[str, Any] = {**end["figures"], "last": last}
        self.seconds: float = end["at"]
        """how long it took; for a lost run, until its last line"""

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """All lines but the first."""
        with open(self.path, encoding="utf-8") as file:
            return [line for text in file if "run" not in (line := _parsed(text)) and line]

    def rows(self, kind: str) -> Iterator[tuple[int, str, list[Row]]]:
        """(rank, name, rows) as they were written; `name` is a metric's."""
        for line in self.lines:
            for rank, names in line.get(kind, {}).items():
                for name, rows in names.items():
                    yield int(rank), name, [_numbers(row) for row in rows]

    def table(self, kind: str) -> list[dict[str, Any]]:
        """One dict for each measurement: rank, seconds, and the values."""
        names = COLUMNS[kind]
        found = [
            {"rank": rank, **dict(zip(names, row, strict=False))} for rank, _, rows in self.rows(kind) for row in rows
        ]
        return sorted(found, key=lambda one: one["rank"])

    def metrics(self) -> list[dict[str, Any]]:
        """One dict for each rank and step, with what was logged in it; more where a name was logged more than once."""
        found: dict[tuple[int, int, int], dict[str, Any]] = {}
        times: dict[tuple[int, str], tuple[int, int]] = {}
        for rank, name, rows in self.rows(METRICS):
            for step, value in rows:
                assert step is not None
                before, time = times.get((rank, name), (-1, 0))
                time = time + 1 if before == step else 0
                times[rank, name] = int(step), time
                key = rank, int(step), time
                there = found.setdefault(key, {"rank": rank, "step": int(step)})
                there[f"{name}_" if name in TAKEN else name] = value
        return [found[key] for key in sorted(found)]

    @property
    def kept(self) -> tuple[int, int]:
        """How many logged values are kept, and how many there were."""
        there = sum(len(rows) for _, _, rows in self.rows(METRICS))
        return there, max(there, self.figures["logged"])

    @property
    def _totals(self) -> Totals:
        totals = Totals()
        for kind in COLUMNS:
            for rank, name, rows in self.rows(kind):
                if rows:
                    totals.add(kind, rank, name, rows)
        return totals

    @property
    def _at(self) -> float:
        return max((line.get("at", 0.0) for line in self.lines), default=0.0)


def _ends(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last line."""
    with open(path, "rb") as file:
        first = file.readline()
        size = file.seek(0, os.SEEK_END)
        file.seek(max(len(first), size - TAIL))
        tail = file.read().splitlines()
    return _parsed(first), _parsed(tail[-1]) if tail else {}


def _parsed(text: str | bytes) -> dict[str, Any]:
    """The line's JSON; empty where it was cut off."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _numbers(row: list[Any]) -> Row:
    """The row with NaN and infinity, which were written as text, as floats."""
    return [float(value) if isinstance(value, str) else value for value in row]
