"""`%distributed attach RUN --now`: what a detached run trains, as after its newest whole step; the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

from nbtrain.annexes.detached.detached_run import same_versions, told
from nbtrain.annexes.detached.digests import digest, digests
from nbtrain.annexes.detached.run_folders import GOES_ON, RunFolder
from nbtrain.base.awake_time import Stopwatch
from nbtrain.base.errors import UsageError
from nbtrain.base.humanize import listed
from nbtrain.base.keyboard_interrupts import shielded, uninterrupted
from nbtrain.exchange.graph.object_path import follow
from nbtrain.notebook.magics.state import MagicsState

LOOK_UP = 0.02
SLOW = 2.0
"""Seconds after which it is said what is waited for,"""
LONG = 10.0
"""and what can be done."""
_now: dict[tuple[Path, float], dict[str, str]] = {}
"""run, and when it began → digests of names that are as it was sent them, but for the weights that they lead to"""


def sent(folder: RunFolder) -> dict[str, str]:
    """Digests of what the notebook holds where it has not changed it since it was sent."""
    noted = folder.read("sent.json") or {}
    return {**noted.get("bound", {}), **noted.get("names", {}), **_now.get(folder.key, {})}


def bring(state: MagicsState, folder: RunFolder) -> None:
    from nbtrain.worker.checkpoints.folder import reading  # on use, as what else loads torch

    same_versions(folder)
    there = False
    while not there:  # others may have asked twice since, and it is gone
        step, name = told(folder, "weights").split()
        _wait(folder, folder.path / name)
        with reading(folder.path / name) as there:
            if there:
                _restore(state, folder, folder.path / name, int(step))


def _restore(state: MagicsState, folder: RunFolder, place: Path, step: int) -> None:
    from nbtrain.worker.checkpoints import open_checkpoint
    from nbtrain.worker.checkpoints.checkpoints_of_cell import Checkpoints
    from nbtrain.worker.checkpoints.content import CheckpointObjects

    notebook, checkpoints = state.notebook, Checkpoints()
    # In a folder of this user alone, by the run's own ranks.
    source = open_checkpoint.together(place, checkpoints.say, weights_only=False)
    there, trained = {}, [address for kind in source.tree.values() for address in kind]
    for address in trained:
        start, steps, found = follow(address, notebook)
        if f"{start}{''.join(map(str, steps))}" == address:
            there[address] = found
    if not there:
        raise UsageError(
            f"{folder}: the notebook has nothing of what it trains, {listed(trained)}: run the cells that make it, or "
            f"%distributed attach {folder.number} without --now"
        )
    before = sent(folder)
    same = [name for name, known in before.items() if known and digest(notebook.get(name)) == known]
    try:
        with shielded():  # never half a model
            uninterrupted(lambda: checkpoints.work.restore(source, CheckpointObjects.of(there), asked=False))
    except UsageError as error:
        raise UsageError(
            f"{str(error).replace(f'the checkpoint {source.path}', f'what {folder} trains')}: run the cells that make "
            f"it as the run has it, and write this line again; once it has ended, its own is nbtrain.detached("
            f"{folder.number}).values"
        ) from None
    _now[folder.key] = {**_now.get(folder.key, {}), **digests(notebook, {*same, *there} & notebook.keys())}
    print(f"nbtrain: {listed(there)}: as after step {step:,} of {folder}, which goes on")


def _wait(folder: RunFolder, place: Path) -> None:
    from nbtrain.worker.checkpoints.folder import marker

    number, watch = folder.number, Stopwatch()
    sentences = {
        SLOW: "waiting for the run to end its step …",
        LONG: f"no step has ended for {LONG:.0f} s: %distributed runs where {number}, in a terminal python -m nbtrain "
        f"runs where {number}, says where its ranks are. ■ ends the waiting, and not the run",
    }  # fmt: skip
    try:
        while marker(place) is None:
            if folder.state != GOES_ON:
                raise UsageError(f"{folder} has ended meanwhile: %distributed attach {number} brings home its work")
            if sentences and watch.seconds > min(sentences):
                print(sentences.pop(min(sentences)), flush=True)
            time.sleep(LOOK_UP)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{folder} goes on: %distributed attach {number} --now asks again") from None
