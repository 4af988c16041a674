"""Writes rows as a table with notes and as bars into docs/performance.md, and says where nbtrain is not first."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import psutil
import torch

from benchmarks.peers.peer import MADE, ROOT, Peer
from benchmarks.peers.registry import PEERS
from benchmarks.peers.rows import Reading, Row
from nbtrain.watch.svg.bars import Bar, Bars
from nbtrain.watch.svg.base import colour
from nbtrain.watch.svg.charts import draw_charts
from nbtrain.watch.svg.legend import Key

PAGE = ROOT / "docs" / "performance.md"
PICTURES = ROOT / "docs" / "pictures" / "peers"
BEGIN, END = "<!-- peers: written by make bench PEERS=1 -->\n", "<!-- end of peers -->\n"
COMMAND = "make bench PEERS=1"
QUIET = 0.5
"""load of a processor at the start, at most: figures of a busy machine are not kept in the documentation"""
OURS, THEIRS = colour(1), colour(7)


class Report:
    """Prints rows as they come, and keeps them in build/; writes all of them into the documentation at the end."""

    def __init__(self, names: Sequence[str], missing: Sequence[str] = ()) -> None:
        self.names, self.missing = names, missing
        self.rows: list[Row] = []
        self.command = COMMAND
        self.version = _version(PEERS["nbtrain"])
        self.load = os.getloadavg()[0] / (os.cpu_count() or 1)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(f"{'ok' if row.first() else '!!':<4}{row.title}   {row.control}", flush=True)
        for name in self.names:
            print(
                f"{'':8}{name:<22}{_figure(row.readings[name], row.unit):>12}   {row.readings[name].words}", flush=True
            )
        MADE.mkdir(parents=True, exist_ok=True)
        (MADE / "report.md").write_text(self.text())

    def verdict(self) -> int:
        """The exit status: 1 where nbtrain is not first."""
        behind = [row for row in self.rows if not row.first()]
        told = PAGE.read_text().partition(END)[2]
        for row in behind:
            print(f"not first: {row.title}: {_against(row)}")
            if row.title.partition(",")[0] not in told:
                print(f"    and {PAGE.relative_to(ROOT)} does not say why")
        return int(bool(behind))

    def write(self, whole: bool) -> None:
        """Put the report into the documentation if it is of all rows, all packages, and a quiet machine."""
        pictures = self._pictures()
        text = self.text(pictures)
        why = (
            "of some rows or packages only"
            if not whole
            else "without " + ", ".join(self.missing)
            if self.missing
            else ""
        )
        if not why and self.load > QUIET:
            why = f"of a busy machine: its load was {self.load:.1f} for each processor"
        if why:
            print(
                f"{PAGE.relative_to(ROOT)} stays as it is: these figures are {why}. They are in build/peers/report.md"
            )
            return
        PICTURES.mkdir(parents=True, exist_ok=True)
        for old in PICTURES.glob("*.svg"):
            old.unlink()
        for name, svg in pictures.items():
            (PICTURES / name).write_text(svg)
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}{text}{END}{rest.partition(END)[2]}")

    def text(self, pictures: Sequence[str] | dict[str, str] = ()) -> str:
        """Everything between the two comments of the page."""
        notes: list[str] = []
        lines = [
            f"Of {time.strftime('%Y-%m-%d')}, by `{self.command}`. {machine()}",
            "",
            f"Versions: {', '.join(versions(self.names))}.",
            "",
            "| | " + " | ".join(self.names) + " | nbtrain by the next |",
            "|---|" + "---|" * (len(self.names) + 1),
        ]
        for row in self.rows:
            cells = [self._cell(row, name, notes) for name in self.names]
            title = f"{row.title}<br>*{row.control}*" if row.control else row.title
            lines.append(f"| {title} | " + " | ".join(cells) + f" | {_ratio(row)} |")
        lines += [
            "",
            "Bold: first of those that did the same work. In brackets: not the same work, and not compared.",
            "",
        ]
        lines += [f"{number}. {note}" for number, note in enumerate(notes, 1)]
        lines += ["", *(f"![{Path(name).stem}](pictures/peers/{name})" for name in pictures)]
        return "\n".join(lines).rstrip() + "\n"

    def _cell(self, row: Row, name: str, notes: list[str]) -> str:
        reading = row.readings[name]
        figure = _figure(reading, row.unit)
        compared = {
            **row.others(),
            **({"nbtrain": value} if (value := row.readings["nbtrain"].value) is not None else {}),
        }
        if name in compared and compared[name] <= row.slack * min(compared.values()):
            figure = f"**{figure}**"
        elif reading.value is not None and not reading.ranked:
            figure = f"({figure})"
        if not reading.words:
            return figure
        note = reading.words.replace("|", "\\|").replace("<", "&lt;")
        if note not in notes:
            notes.append(note)
        return f"{figure} <sup>{notes.index(note) + 1}</sup>"

    def _pictures(self) -> dict[str, str]:
        """One drawing for each row in which there is something to compare."""
        drawn = {}
        for number, row in enumerate(self.rows, 1):
            values = {name: row.readings[name].value for name in self.names if row.readings[name].ranked}
            known = {name: value for name, value in values.items() if value is not None}
            if len(known) > 1 and max(known.values()) > 0:
                drawn[f"{number:02d}.svg"] = _bars(row, known)
        return drawn


def _bars(row: Row, values: dict[str, float]) -> str:
    rows = [
        Bar("", ((max(value, 0.0), OURS if name == "nbtrain" else THEIRS),), f"{_number(value, row.unit)} {name}")
        for name, value in values.items()
    ]
    return draw_charts((), 1, bars=Bars(row.title, rows, [Key("less is better", OURS)]))


def _figure(reading: Reading, unit: str) -> str:
    return "—" if reading.value is None else _number(reading.value, unit)


def _number(value: float, unit: str) -> str:
    if not unit:
        return f"{value:.0f}"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f} {unit}"


def _ratio(row: Row) -> str:
    """What nbtrain needs, by what the best of the others needs."""
    ours, others = row.readings["nbtrain"].value, row.others()
    if ours is None or not others:
        return ""
    best = min(others.values())
    return f"{ours / best:.2f} ×" if best > 0 else ""


def _against(row: Row) -> str:
    ours, others = row.readings["nbtrain"], row.others()
    if ours.value is None:
        return ours.words
    best = min(others, key=others.__getitem__)
    return f"{_number(ours.value, row.unit)}, {best} {_number(others[best], row.unit)}"


def machine() -> str:
    """What the figures are of."""
    model = platform.processor() or platform.machine()
    for line in _lines_of("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} processors ({model}), {memory:.0f} GB, no GPU, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )


def versions(names: Sequence[str]) -> list[str]:
    """`ipyparallel 9.2.0`; nbtrain with its commit."""
    return [f"{name} {_version(PEERS[name])}" for name in names]


def _version(peer: Peer) -> str:
    if not peer.packages:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "?"
    sites = [str(path) for path in (MADE / peer.name).glob("lib/python*/site-packages")]
    sites += sys.path  # of a package that runs in nbtrain's own environment, as Lightning does
    found: list[Distribution] = [one for one in distributions(path=sites) if one.metadata["Name"] == peer.name]
    return found[0].version if found else "?"


def _lines_of(file: str) -> list[str]:
    path = Path(file)
    return path.read_text().splitlines() if path.is_file() else []
