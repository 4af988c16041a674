"""Reads and sets the states of a process's default random generators, importing nothing for it.

On their way between notebook and ranks they are packed: plain bytes and numbers.
"""

from __future__ import annotations

import random
import sys
from typing import Any

States = dict[str, Any]


def capture() -> States:
    """The states of all default generators in use."""
    states: States = {"random": random.getstate()}
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_rng_state"):  # else it is being imported
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        states["numpy"] = numpy.random.get_state()
    return states


def restore(states: States) -> None:
    """Set the generators to these states. CUDA's only if CUDA is in use: this must not initialise it."""
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    if "random" in states:
        random.setstate(states["random"])
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(states["numpy"])
    if "torch" in states and torch is not None:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])


def packed(states: States) -> States:
    made = dict(states)
    for name in ("torch", "cuda"):
        if name in made:
            made[name] = made[name].cpu().numpy().tobytes()
    if "numpy" in made:
        kind, keys, *rest = made["numpy"]
        made["numpy"] = (kind, keys.tobytes(), *rest)
    return made


def unpacked(states: States) -> States:
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
