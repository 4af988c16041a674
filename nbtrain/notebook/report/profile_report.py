"""What `--profile` has found: one trace of all ranks, which Perfetto and Chrome open, and the dearest operators."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nbtrain.base import tables
from nbtrain.base.atomic_write import replacing
from nbtrain.base.events import Profiled

FOLDER = "nbtrain-output"
TOP = 10
HEAD = ("operator", "calls", "CPU ms", "device ms", "share")
TOO_SHORT = "--profile: the cell has ended before its second step, from which on it is profiled"
DEVICE = 1_000_000
"""added to the number of a GPU's stream, which would be taken for a thread's"""


def profile_lines(profiles: Mapping[int, Profiled], number: int | None) -> list[str]:
    """Merge the traces into one file, and say what is in it. `number`: of the notebook's cell."""
    told = {rank: profile for rank, profile in sorted(profiles.items()) if profile.path}
    if not told:
        return [TOO_SHORT]
    Path(FOLDER).mkdir(exist_ok=True)
    path = os.path.join(FOLDER, f"trace-{'cell' if number is None else f'In{number}'}.json")
    merge({rank: profile.path for rank, profile in told.items()}, path)
    steps = max(profile.steps for profile in told.values())
    return [
        f"profile of {steps} step{'s' * (steps != 1)} on {len(told)} rank{'s' * (len(told) > 1)}: {path} "
        "(open it in ui.perfetto.dev; a process for each rank)",
        tables.text(HEAD, operators(told)),
        "waited for other ranks: "
        + ", ".join(f"rank {rank} {profile.waited / max(profile.seconds, 1e-9):.0%}" for rank, profile in told.items()),
    ]


def operators(profiles: Mapping[int, Profiled]) -> list[tuple[str, ...]]:
    """The operators that took longest on all ranks together, each without what it calls."""
    sums: dict[str, tuple[int, float, float]] = {}
    for profile in profiles.values():
        for name, count, processor, device in profile.operators:
            before = sums.get(name, (0, 0.0, 0.0))
            sums[name] = before[0] + count, before[1] + processor, before[2] + device
    total = sum(processor + device for _, processor, device in sums.values()) or 1.0
    dearest = sorted(sums.items(), key=lambda item: -(item[1][1] + item[1][2]))[:TOP]
    return [
        (name[: tables.WIDE], f"{count:,}", f"{processor:.1f}", f"{device:.1f}", f"{(processor + device) / total:.0%}")
        for name, (count, processor, device) in dearest
    ]


def merge(paths: Mapping[int, str], to: str) -> None:
    """One trace of several, in which each rank is a process; the files are removed."""
    events: list[dict[str, Any]] = []
    base: float | None = None
    for rank, path in paths.items():
        with open(path, encoding="utf-8") as file:
            trace = json.load(file)
        os.remove(path)
        own = float(trace.get("baseTimeNanoseconds", 0))
        base = own if base is None else base
        events += _of_rank(trace["traceEvents"], rank, (own - base) / 1e3)
    with replacing(to) as beside, open(beside, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": int(base or 0)}, file)


def _of_rank(events: list[dict[str, Any]], rank: int, later: float) -> list[dict[str, Any]]:
    """`later`: microseconds between the clocks of this trace and of the first."""
    names = [
        {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}},
    ]
    own_events = []
    for event in events:
        if event.get("ph") == "M" and event.get("name") != "thread_name":
            continue  # names of processes, which are the ranks now
        event["pid"] = rank
        if isinstance(event.get("tid"), int) and "stream" in event.get("args", {}):
            event["tid"] += DEVICE
        if "ts" in event:
            event["ts"] += later
        own_events.append(event)
    return names + own_events
