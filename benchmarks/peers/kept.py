"""Keeps the rows of a run as they come, so that one that was ended can go on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.rows import Reading, Row


class Kept:
    """Rows of each group in a file; they are used again only by a run of the same `what`: commit, packages, how."""

    def __init__(self, file: Path, what: list[Any], go_on: bool) -> None:
        self._file, self._what = file, what
        self._groups: dict[str, list[Any]] = {}
        if go_on and file.is_file():
            known = json.loads(file.read_text())
            if known["what"] != what:
                raise SystemExit(f"GO_ON: {file.name} is of {known['what']}, this run would be of {what}")
            self._groups = known["groups"]

    def __bool__(self) -> bool:
        """There are rows of a run before this one."""
        return bool(self._groups)

    def rows(self, group: str, measure: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        """Those of this group that are known, or else measured; a group that was ended begins anew."""
        if group in self._groups:
            yield from map(_row, self._groups[group])
            return
        measured = []
        for row in measure():
            measured.append(row)
            yield row
        self._groups[group] = [asdict(row) for row in measured]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({"what": self._what, "groups": self._groups}))


def _row(known: dict[str, Any]) -> Row:
    readings = {name: Reading(**reading) for name, reading in known["readings"].items()}
    return Row(**{**known, "readings": readings})
