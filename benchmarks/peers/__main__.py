"""`make bench PEERS=1`: measures the rows, writes the report, and fails where nbtrain is not first."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.kept import Kept
from benchmarks.peers.peer import MADE
from benchmarks.peers.registry import PEERS
from benchmarks.peers.report import Report
from benchmarks.peers.rows import GROUPS, Bench


def main() -> int:
    asked = _arguments()
    signal.signal(signal.SIGTERM, _stop)
    _put_errors_of_kernels_into(MADE / "kernels.log")
    peers = [PEERS[name] for name in asked.peers or PEERS]
    there = [peer for peer in peers if peer.python.is_file()]
    report = Report([peer.name for peer in there], missing=[peer.name for peer in peers if peer not in there])
    kept = Kept(MADE / "rows.json", [report.version, report.names, asked.quick], asked.go_on)
    report.command += " GO_ON=1: the run was ended once, and went on" * bool(kept)
    for name in asked.rows or GROUPS:
        for row in kept.rows(name, partial(GROUPS[name], Bench(there, asked.quick))):
            report.add(row)
    whole = not (asked.rows or asked.peers or asked.quick)
    report.write(whole)
    return report.verdict()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench PEERS=1", description=__doc__)
    parser.add_argument("--rows", type=_names(GROUPS), help=", ".join(GROUPS))
    parser.add_argument("--peers", type=_names(PEERS), help=f"nbtrain, and of these: {', '.join(PEERS)}")
    parser.add_argument("--quick", action="store_true", help="everything once: whether it works, not how fast")
    parser.add_argument("--go-on", action="store_true", help="after the rows of a run of this commit that was ended")
    return parser.parse_args()


def _names(known: dict[str, Any]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.replace(",", " ").split()
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(known)}")
        return ["nbtrain", *(name for name in names if name != "nbtrain")] if known is PEERS else names

    return parse


def _put_errors_of_kernels_into(log: Path) -> None:
    """Kernels and ranks inherit descriptor 2, and say much there; what this process says is still shown."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    log.parent.mkdir(parents=True, exist_ok=True)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)


def _stop(*_: Any) -> None:
    """A signal ends the kernels that were started, too."""
    sys.exit("ended by SIGTERM")


if __name__ == "__main__":
    sys.exit(main())
