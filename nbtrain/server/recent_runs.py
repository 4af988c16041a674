"""The last runs of each notebook, as the page lists them: read from this user's history."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbtrain.runs import run_folder
from nbtrain.runs.read_run_file import RunRecord, UnreadableRecord

LAST = 5
"""runs of a notebook, at most"""


def recent_runs(root: Path) -> list[dict[str, Any]]:
    """Notebooks by their last run, the newest first. `root`: the folder that the server shows; `path` is below it, and
    empty where the notebook is not."""
    found: dict[str, list[dict[str, Any]]] = {}
    for notebook, run in _runs():
        runs = found.setdefault(notebook, [])
        if len(runs) < LAST:
            runs.append(run)
    return [{"notebook": name, "path": _below(root, name), "runs": runs} for name, runs in found.items() if name]


def _runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The newest first."""
    where = run_folder.folder()
    for number, path in reversed(run_folder.files(where) if where is not None else []):
        with suppress(OSError, UnreadableRecord, KeyError):  # it was just removed, or is another version's
            record = RunRecord(number, path)
            yield record.settings["notebook"], _told(record)


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
