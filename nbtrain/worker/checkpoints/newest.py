"""The newest checkpoint of a run, loaded in the notebook for a run that goes on."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from nbtrain.worker.checkpoints import folder
from nbtrain.worker.checkpoints.checkpoints_of_cell import Checkpoints
from nbtrain.worker.checkpoints.content import CheckpointObjects
from nbtrain.worker.checkpoints.schedule import place_of


def last_number(to: str) -> int:
    """The number of the newest checkpoint in this folder; those that are made from now on have larger ones."""
    return folder.last_number(folder.at_intervals(place_of(to)))


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
