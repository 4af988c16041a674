"""Derives the profile with activation checkpointing from the one without: arithmetic, no second forward."""

from __future__ import annotations

from dataclasses import replace

from nbtrain.strategies.memory_estimate import Moment, Profile, Unit

WORTH = 0.1
"""share of the activations that it must save to be worth it"""


def repeated(profile: Profile) -> str:
    """The class of repeated blocks for which checkpointing saves most; empty if it saves next to nothing."""
    saved: dict[str, list[int]] = {}
    for unit in profile.units:
        saved.setdefault(unit.kind, []).append(_saved(unit))
    best = max((kind for kind, of in saved.items() if len(of) > 1), key=lambda kind: sum(saved[kind]), default="")
    return best if best and sum(saved[best]) > WORTH * profile.activations else ""


def recomputed(profile: Profile, kind: str) -> Profile:
    """The profile with all blocks of this class checkpointed."""
    units = tuple(replace(unit, activations=unit.activations - _saved(unit)) if unit.kind == kind else unit
                  for unit in profile.units)  # fmt: skip
    return replace(
        profile,
        units=units,
        moments=_moments(profile, kind),
        recomputed=(kind,),
    )


def _saved(unit: Unit) -> int:
    """Bytes that checkpointing this unit saves: all that it keeps except its output, which the next unit keeps."""
    return max(0, unit.activations - unit.output)


def _moments(profile: Profile, kind: str) -> tuple[Moment, ...]:
    """Moments of the backward. The gradients at a moment tell how far the backward is; blocks before that have not
    recomputed anything yet."""
    gradients = [0] * len(profile.units)
    for weight in profile.weights:
        if weight.trains and weight.unit >= 0:
            gradients[weight.unit] += weight.bytes
    begins: list[tuple[int, int]] = []
    """for each block: bytes of gradients when the backward reaches it, bytes that it recomputes then"""
    there = 0
    for unit, own in zip(reversed(profile.units), reversed(gradients), strict=True):
        if unit.kind == kind:
            begins.append((there, _saved(unit)))
        there += own
    found = []
    for at, moment in enumerate(profile.moments):  # the first is the end of the forward
        waits = sum(saved for begin, saved in begins if not at or begin > moment.gradients)
        found.append(Moment(max(0, moment.activations - waits), moment.gradients))
    return tuple(found)
