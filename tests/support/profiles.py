"""Profiles of models that nobody made: of round numbers, for what is worked out from them."""

from __future__ import annotations

from typing import Any

from nbtrain.strategies.memory_estimate import Moment, Profile, Unit, Weight

MB = 2**20
SIZES = (8 * MB, 4 * MB, 2 * MB, 2 * MB)
"""of the weights: 16 MB, and all of them train"""


def profile(*activations: int, sizes: tuple[int, ...] = SIZES, width: int = 4, **others: Any) -> Profile:
    """Gradients come in the opposite order, one with each of the moments after the first."""
    weights = tuple(
        Weight(name=str(i), numel=size // width, bytes=size, trains=True, state=2 * size, unit=0)
        for i, size in enumerate(sizes)
    )
    come = [sum(sizes[len(sizes) - i :]) for i in range(len(sizes) + 1)]
    moments = [Moment(a, g) for a, g in zip(activations, come, strict=False)]
    given: dict[str, Any] = {
        "optimizer": "AdamW",
        "units": (Unit(path="", kind="Net", activations=max(activations), output=0),),
        "buffers": 0,
        "step": 2 * max(sizes),
        "step_together": sum(sizes),
    }
    return Profile(model="net", weights=weights, moments=tuple(moments), samples=4, precision="32", **(given | others))
