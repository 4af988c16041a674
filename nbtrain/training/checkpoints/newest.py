"""The newest checkpoint of a run, loaded in the notebook for a run that goes on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

from nbtrain.training.checkpoints import folder
from nbtrain.training.checkpoints.content import CheckpointObjects
from nbtrain.training.checkpoints.save_and_load import Checkpoints
from nbtrain.training.checkpoints.schedule import place_of


def load_newest(to: str, since: float, objects: Mapping[str, Any]) -> bytes | None:
    """Put the newest checkpoint in this folder that was made since then into these objects, and tell where loops are
    to go on. None if there is none."""
    place = place_of(to)
    made = [path for path, _ in folder.at_intervals(place) if os.path.getmtime(path) >= since] if place.is_dir() else []
    if not made:
        return None
    one, chosen = Checkpoints(), CheckpointObjects.of(objects)
    named = {name: item for _, table in chosen.kinds() for name, item in table.items()}
    one.load(max(made, key=os.path.getmtime), named)
    return pickle.dumps(one.positions.pending)
