"""`python -m nbtrain doctor`, `runs`, `node TICKET`: what is done from a terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 where the doctor finds that nbtrain cannot work."""
    parser = argparse.ArgumentParser(
        prog="python -m nbtrain",
        description="Train a model of your notebook on many processes or GPUs. In the notebook: %load_ext nbtrain",
    )
    commands = parser.add_subparsers(dest="command", title="commands", metavar="")
    commands.add_parser("doctor", help="what is possible here, what is not, and why")
    runs = commands.add_parser("runs", help="the runs that go on without their notebook (%%distributed --detach)")
    runs.add_argument("action", nargs="?", choices=("stop", "where", "kill", "drop"), help="what to do with one")
    runs.add_argument("run", nargs="?", default="", help="its number; left out: the newest")
    node = commands.add_parser("node", help="let this machine take part in a notebook's training")
    node.add_argument(
        "ticket", nargs="?", default="-",
        help="what %%distributed join in the notebook shows; left out: NBTRAIN_TICKET, or standard input",
    )  # fmt: skip
    asked = parser.parse_args(arguments)
    if asked.command is None:
        parser.print_help()
        return 0
    if asked.command == "node":
        from nbtrain.engines.remote.node import main as take_part

        return take_part([asked.ticket])
    if asked.command == "runs":
        return _runs(asked.action, asked.run)
    from nbtrain.notebook import doctor

    findings = doctor.diagnose()
    print(doctor.report(findings))
    return int(any(finding.level == "bad" for finding in findings))


def _runs(action: str | None, run: str) -> int:
    from nbtrain.base.errors import UsageError
    from nbtrain.notebook import annexes

    try:
        print(annexes.load("runs", "detached", "runs_verb:done")(action, run))
    except UsageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    if sys.argv[1:2] == ["node"]:
        # All is closed. To take torch down takes half a second, for which a notebook's end would wait.
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
