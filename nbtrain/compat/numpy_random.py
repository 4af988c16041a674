"""numpy's random generators. Nothing here imports numpy."""

from __future__ import annotations

import sys
from typing import Any

from nbtrain.compat.internals import Internals

its = Internals("numpy")

its.members("numpy.random.mtrand", "_rand")


def seed_sequence(bits: Any) -> Any:
    """The seed sequence of a bit generator, from which `spawn` goes on; public from numpy 1.25 on."""
    return getattr(bits, "seed_seq", None) or getattr(bits, "_seed_seq", None)


def bit_generator(generator: Any) -> Any:
    """The bit generator of a Generator or a RandomState; the latter has no public name for it."""
    return generator._bit_generator if hasattr(generator, "_bit_generator") else generator.bit_generator


def is_global_state(state: Any) -> bool:
    """Whether it is the state behind `numpy.random.rand()` and the module's other functions."""
    numpy: Any = sys.modules["numpy.random"]
    return state is numpy.mtrand._rand
