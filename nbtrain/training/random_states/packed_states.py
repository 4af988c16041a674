"""Random states on their way between notebook and ranks, as plain bytes and numbers."""

from __future__ import annotations

import random
from typing import Any

import nbtrain.training.random_states.default_generators as default_generators
from nbtrain.training.random_states.default_generators import States


def capture() -> States:
    """The random states of this process."""
    return _wrapped(default_generators.capture())


def restore(states: States) -> None:
    """Sets the random states of this process."""
    default_generators.restore(_unwrapped(states))


def adopt(randomness: Any, states: States) -> None:
    """On a rank: start from the notebook's random states. What the notebook has not loaded yet starts from the rest."""
    import numpy
    import torch

    states = _unwrapped(states)
    # Not this rank's own: where that stands after an earlier cell is another place on every rank.
    states.setdefault("torch", torch.Generator().get_state())
    seed = random.Random(repr(states["random"])).randrange(2**32)
    states.setdefault("numpy", numpy.random.RandomState(seed).get_state(legacy=True))
    randomness.adopt(states)


def collect(randomness: Any) -> States | None:
    """On the lead, after a cell: the random states that the notebook is to have. None: it has them already."""
    states = randomness.collect()
    return None if states is None else _wrapped(states)


def _wrapped(states: States) -> States:
    made = dict(states)
    for name in ("torch", "cuda"):
        if name in made:
            made[name] = made[name].cpu().numpy().tobytes()
    if "numpy" in made:
        kind, keys, *rest = made["numpy"]
        made["numpy"] = (kind, keys.tobytes(), *rest)
    return made


def _unwrapped(states: States) -> States:
    made = dict(states)
    for name in ("torch", "cuda"):
        if name in made:
            import torch

            made[name] = torch.frombuffer(bytearray(made[name]), dtype=torch.uint8)
    if "numpy" in made:
        import numpy

        kind, keys, *rest = made["numpy"]
        made["numpy"] = (kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest)
    return made
