"""The newest checkpoint of a run, loaded in the notebook for a run that goes on."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from typing import Any

from nbtrain.worker.checkpoints import folder, open_checkpoint
from nbtrain.worker.checkpoints.checkpoints_of_cell import Checkpoints
from nbtrain.worker.checkpoints.content import CheckpointObjects
from nbtrain.worker.checkpoints.schedule import place_of


def last_number(to: str) -> int:
    """The number of the newest checkpoint in this folder; those that are made from now on have larger ones."""
    return folder.last_number(folder.at_intervals(place_of(to)))


def lacking(to: str, objects: Mapping[str, Any]) -> list[str]:
    """What the newest checkpoint in this folder has of models, optimizers and schedules, and these objects have not."""
    newest, _ = folder.at_intervals(place_of(to))[-1]
    tree = open_checkpoint.open_source(newest, weights_only=False).tree  # this run has written it
    addresses = {address for kind in tree.values() for address in kind}
    there = {*objects, *(type(item).__name__ for item in objects.values())}  # what a cell has made has its class's name
    return sorted(name for one in addresses if (name := re.split(r"\W", one, maxsplit=1)[0]) not in there)


def load_newest(to: str, after: int, objects: Mapping[str, Any]) -> bytes | None:
    """Put the newest checkpoint in this folder into these objects, and tell where loops are to go on. None if none has
    a number larger than that."""
    if last_number(to) <= after:
        return None
    newest, _ = folder.at_intervals(place_of(to))[-1]
    checkpoints, chosen = Checkpoints(), CheckpointObjects.of(objects)
    named = {name: item for _, table in chosen.kinds() for name, item in table.items()}
    checkpoints.work.load(newest, named, weights_only=False)  # this run has written it
    return pickle.dumps(checkpoints.positions.pending)
