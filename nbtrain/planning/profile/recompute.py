"""What a profile would be if blocks of the model computed their activations again: arithmetic, no second forward."""

from __future__ import annotations

from dataclasses import replace

from nbtrain.strategies.estimates import Moment, Profile, Unit

WORTH = 0.1
"""of the activations have to be saved for it"""
AGAIN = 4 / 3
"""A backward computes twice what the forward does, and now the forward besides."""


def repeated(profile: Profile) -> str:
    """The class of the blocks for which it would save the most; empty where it saves next to nothing."""
    saved: dict[str, list[int]] = {}
    for unit in profile.units:
        saved.setdefault(unit.kind, []).append(_saved(unit))
    best = max((kind for kind, of in saved.items() if len(of) > 1), key=lambda kind: sum(saved[kind]), default="")
    return best if best and sum(saved[best]) > WORTH * profile.activations else ""


def recomputed(profile: Profile, kind: str) -> Profile:
    """With all blocks of this class."""
    units = tuple(replace(unit, activations=unit.activations - _saved(unit)) if unit.kind == kind else unit
                  for unit in profile.units)  # fmt: skip
    return replace(
        profile,
        units=units,
        moments=_moments(profile, kind),
        operations=profile.operations * AGAIN,
        recomputed=(kind,),
    )


def _saved(unit: Unit) -> int:
    """All that it keeps but what it returns, which whoever comes next keeps."""
    return max(0, unit.activations - unit.output)


def _moments(profile: Profile, kind: str) -> tuple[Moment, ...]:
    """How far the backward has come at a moment is seen by the gradients that are there. A block that it has not come
    to has nothing yet of what it will compute again."""
    gradients = [0] * len(profile.units)
    for weight in profile.weights:
        if weight.trains and weight.unit >= 0:
            gradients[weight.unit] += weight.bytes
    begins: list[tuple[int, int]] = []
    """(gradients that are there when the backward comes to a block, bytes that the block has not had until then)"""
    there = 0
    for unit, own in zip(reversed(profile.units), reversed(gradients), strict=True):
        if unit.kind == kind:
            begins.append((there, _saved(unit)))
        there += own
    found = [Moment(_after(moment, begins), moment.gradients) for moment in profile.moments[:1]]
    for moment in profile.moments[1:]:
        waits = sum(saved for begin, saved in begins if begin > moment.gradients)
        found.append(Moment(max(0, moment.activations - waits), moment.gradients))
    return tuple(found)


def _after(end: Moment, begins: list[tuple[int, int]]) -> int:
    """At the end of the forward no block has anything of it."""
    return max(0, end.activations - sum(saved for _, saved in begins))
