"""Places labels beside the points of a scatter plot, where they cover no other label and no point."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from nbtrain.watch.svg.base import BOLD, LINE, LONGEST, Box, Plot, escaped, short
from nbtrain.watch.svg.dots import RADIUS, Dot

LETTER = 6.4
"""average width of a letter, rounded up"""
AROUND = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))
"""directions in which a label may stand from its point, the best first"""
FARTHEST = 9


def draw_labels(dots: Sequence[Dot], plot: Plot) -> str:
    """Labels beside their points, where they cover no other label or point; the best dot chooses first."""
    taken = [_around(plot.x(dot.x), plot.y(dot.y), RADIUS + (4 if dot.best else 0)) for dot in dots]
    drawn = ""
    for dot in sorted(dots, key=lambda dot: not dot.best):
        label = short(dot.label, LONGEST)
        wide = LETTER * _letters(label) * (1.08 if dot.best else 1)
        free_place = next((place for place in _places(dot, plot, wide) if _free(place[0], taken, plot)), None)
        if free_place is None:
            continue  # too crowded: the point's tooltip and the table have the name
        box, away = free_place
        taken.append(box)
        x, y = plot.x(dot.x), plot.y(dot.y)
        if away:  # a line leads to its point
            to = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
            drawn += f'<path d="M{x:.1f} {y:.1f}L{to[0]:.1f} {to[1]:.1f}" stroke="currentColor" stroke-opacity=".45"/>'
        weight = f' font-weight="600" fill="{BOLD}"' if dot.best else ""
        drawn += f'<text x="{box[0]:.1f}" y="{box[3] - 3.5:.1f}"{weight}>{escaped(label)}</text>'
    return drawn


def _places(dot: Dot, plot: Plot, wide: float) -> Iterable[tuple[Box, bool]]:
    """Boxes for a label, the nearest first, and whether it needs a line to its point."""
    x, y = plot.x(dot.x), plot.y(dot.y)
    near = RADIUS + (8 if dot.best else 4)
    for far in range(FARTHEST):
        gap = near + far * LINE
        for across, down in AROUND:
            left = x - wide / 2 if not across else x + gap if across > 0 else x - gap - wide
            middle = y + down * (gap + LINE / 2 if not across else gap)
            yield (left, middle - LINE / 2, left + wide, middle + LINE / 2), far > 0


def _free(box: Box, taken: Sequence[Box], plot: Plot) -> bool:
    over = (box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in taken)
    inside = box[0] >= plot.left + 2 and box[1] >= plot.top - LINE / 2
    return inside and box[2] <= plot.right + 10 and box[3] <= plot.foot - 1 and not any(over)


def _around(x: float, y: float, radius: float) -> Box:
    return x - radius, y - radius, x + radius, y + radius


def _letters(text: str) -> float:
    """East Asian letters are twice as wide."""
    return sum(1.0 + (unicodedata.east_asian_width(letter) in "WF") for letter in text)
