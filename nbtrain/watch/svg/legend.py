"""A line of names with their colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nbtrain.watch.svg.base import TEXT, escaped

NARROW = "fijlrt "
"""letters about half as wide as others"""


class Key(NamedTuple):
    """A name in a legend."""

    name: str
    fill: str
    """its colour; `none`: a word without one"""
    opacity: float = 1.0
    tone: str = TEXT
    """the colour of the words"""


Legend = Sequence[Key]
"""in one line"""


def draw_legend(names: Legend) -> str:
    drawn, x = "", 0
    for name, fill, opacity, tone in names:
        if fill != "none":
            drawn += f'<rect x="{x}" y="3" width="10" height="8" fill="{fill}" fill-opacity="{opacity}"/>'
            x += 14
        drawn += f'<text x="{x}" y="11" fill="{tone}">{escaped(name)}</text>'
        x += 14 + round(sum(3.5 if letter in NARROW else 6.5 for letter in name))
    return drawn
