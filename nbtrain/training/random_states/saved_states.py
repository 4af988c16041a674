"""Random states in a checkpoint: every rank's own, and those of one process.

On as many ranks as before each goes on with its own. On another number the ranks start from where rank 0 stood, as they
do at the beginning of a cell: rank 0 goes on, the others draw from numbers derived from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbtrain.training.random_states.default_generators import States, capture, restore
from nbtrain.training.random_states.rank_draws import Randomness

STREAMS = "streams"
"""The key of random states in checkpoints, as all versions write it."""
KEPT = ("shared_states", "began", "seed", "cuda_seed", "mark", "last_mark", "left", "is_together")


def of_rank(randomness: Randomness) -> dict[str, Any]:
    """Everything that `put_back` needs."""
    held = {name: getattr(randomness, name) for name in KEPT}
    held |= {name: dict(value) for name, value in held.items() if isinstance(value, dict)}
    return {"kept": held, STREAMS: capture()}


def put_back(randomness: Randomness, saved: dict[str, Any]) -> None:
    """As `of_rank` found them."""
    for name, value in saved["kept"].items():
        setattr(randomness, name, dict(value) if isinstance(value, dict) else value)
    restore(saved[STREAMS])
    randomness.known, randomness.printed = None, (None, 0)  # the notebook does not know of these


def of_one_process(randomness: Randomness | None) -> States:
    """The notebook's random states if the cell ended here (on rank 0)."""
    if randomness is None or randomness.alone or randomness.is_together:
        return capture()
    known, randomness.known = randomness.known, None
    try:
        return randomness.collect() or capture()
    finally:
        randomness.known = known


def go_on(randomness: Randomness, world_size: int, one_process: States, ranks: Sequence[Any]) -> None:
    """Go on from the checkpoint's random states. `ranks`: what `of_rank` returned on each."""
    if len(ranks) == world_size:
        put_back(randomness, ranks[randomness.rank])
        return
    randomness.is_together = False
    randomness.adopt(one_process)
    randomness.together()
    randomness.known = None
