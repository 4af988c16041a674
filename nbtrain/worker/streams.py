"""Random states on their way between notebook and ranks, as plain bytes and numbers."""

from __future__ import annotations

import random
import sys
from typing import Any

States = dict[str, Any]


def capture() -> States:
    """Where this process's streams stand; torch and numpy only if they are loaded."""
    states: States = {"random": random.getstate()}
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tobytes(), *rest)
    return states


def restore(states: States) -> None:
    """Let this process's streams stand there."""
    for name, state in _unwrapped(states).items():
        if name == "random":
            random.setstate(state)
        elif name == "numpy" and "numpy" in sys.modules:
            sys.modules["numpy"].random.set_state(state)
        elif name == "torch" and "torch" in sys.modules:
            sys.modules["torch"].set_rng_state(state)
        elif name == "cuda" and "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            sys.modules["torch"].cuda.set_rng_state(state)


def adopt(randomness: Any, states: States) -> None:
    """On a rank: start from the notebook's streams. What the notebook has not loaded yet starts from the rest."""
    import numpy
    import torch

    states = _unwrapped(states)
    states.setdefault("torch", torch.get_rng_state())
    seed = random.Random(repr(states["random"])).randrange(2**32)
    states.setdefault("numpy", numpy.random.RandomState(seed).get_state(legacy=True))
    randomness.adopt(states)


def collect(randomness: Any) -> States | None:
    """On the lead, after a cell: where the notebook's streams are to stand. None: where they stand already."""
    found = randomness.collect()
    if found is None:
        return None
    states = dict(found)
    for name in ("torch", "cuda"):
        if name in states:
            states[name] = states[name].cpu().numpy().tobytes()
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        states["numpy"] = (kind, keys.tobytes(), *rest)
    return states


def _unwrapped(states: States) -> States:
    import numpy

    made = dict(states)
    for name in ("torch", "cuda"):
        if name in made:
            import torch

            made[name] = torch.frombuffer(bytearray(made[name]), dtype=torch.uint8)
    if "numpy" in made:
        kind, keys, *rest = made["numpy"]
        made["numpy"] = (kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest)
    return made
