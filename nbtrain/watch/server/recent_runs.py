"""The last runs of each notebook, as the page lists them: read from this user's history."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbtrain.watch.runs.read_run_file import RunRecord, newest_first

LAST = 5
"""runs of a notebook, at most"""

RunsByNotebook = dict[str, list[dict[str, Any]]]


def recent_runs(root: Path) -> list[dict[str, Any]]:
    """Notebooks by their last run, the newest first; any thread may ask. `root`: the folder that the server shows;
    `path` is below it, and empty where the notebook is not."""
    return [{"notebook": name, "path": _below(root, name), "runs": runs} for name, runs in _read().items()]


def _read() -> RunsByNotebook:
    by_notebook: RunsByNotebook = {}

    def wanted(settings: Mapping[str, Any]) -> bool:
        name = settings["notebook"]
        return bool(name) and len(by_notebook.get(name, ())) < LAST

    for record in newest_first(wanted):
        with suppress(KeyError):  # another version's
            run = _told(record)
            by_notebook.setdefault(record.settings["notebook"], []).append(run)
    return by_notebook


def _told(record: RunRecord) -> dict[str, Any]:
    settings = record.settings
    return {
        "number": record.number,
        "began": settings["began"],
        "cell": settings["cell"],
        "strategy": settings["strategy"],
        "ranks": settings["world_size"],
        "steps": record.figures["steps"],
        "seconds": record.seconds,
        "how": record.how,
        "text": record.text,
    }


def _below(root: Path, notebook: str) -> str:
    """The notebook's path as the server's addresses have it."""
    path = root / notebook.removeprefix("RTC:")
    with suppress(OSError, ValueError):
        if path.is_file():
            return path.resolve().relative_to(root.resolve()).as_posix()
    return ""
