"""The default random streams of a process: where they stand. Nothing is imported for it that is not in use."""

from __future__ import annotations

import random
import sys
from typing import Any

States = dict[str, Any]


def capture() -> States:
    """The states; torch's, numpy's and CUDA's only where they are in use."""
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
    """Let the streams stand there. CUDA's only where it is in use: this must not be what starts it."""
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
