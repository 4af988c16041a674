"""What every drawing has: colours, a plot's area, text that is escaped, and the SVG around it all."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from html import escape

COLOURS = ("#3b8bd0", "#dd6b33", "#3d9b57", "#9b6bd6", "#ab8619", "#d4558c", "#22929e", "#7b8594")
PLAIN, BOLD, *_ = COLOURS
BAD = "#d5473c"
TEXT = "#767676"
INK = "color:var(--jp-ui-font-color1,currentColor)"
"""the text colour of the page around the SVG; an `<img>` does not know it, and uses TEXT instead"""
DISTINCT = len(COLOURS)
"""number of different colours"""
LINE = 14
"""height of a line of a legend or of a label, in pixels"""
LONGEST = 30
"""letters that fit into a label"""
NARROW = 7
"""letters that fit beside an axis"""

Words = Callable[[float], str]
Box = tuple[float, float, float, float]
"""left, top, right, bottom"""
Range = tuple[float, float]


class Picture:
    """An SVG that a notebook shows; `.svg` is its text."""

    def __init__(self, svg: str, text: str) -> None:
        self.svg, self._text = svg, text

    def _repr_html_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self._text


def image(svg: str, alt: str) -> str:
    """The drawing as an `<img>`: pages that do not trust a notebook take drawings out, and leave images."""
    data = base64.b64encode(svg.replace(INK, f"color:{TEXT}", 1).encode()).decode()
    return f'<img alt="{escaped(alt)}" style="max-width:100%" src="data:image/svg+xml;base64,{data}">'


def colour(number: int) -> str:
    return COLOURS[number % DISTINCT]


def short(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def step(value: float) -> str:
    return f"step {value:,.0f}"


def narrow(words: Words) -> Words:
    """The same words, short enough to stand beside an axis, where longer ones are cut: 8.07e-5 for 8.07e-05."""

    def fitting(value: float) -> str:
        said = words(value)
        for digits in (2, 1, 0):
            if len(said) <= NARROW and "+" not in said:
                break
            said = re.sub(r"e([+-])0*", lambda exponent: "e" + exponent[1].strip("+"), f"{value:.{digits}e}")
        return said

    return fitting


def whole_svg(size: tuple[float, float], title: str, drawn: str, ink: str) -> str:
    """`ink`: the attributes that colour the text."""
    width, height = size
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="system-ui,sans-serif" font-size="11" {ink}>'
        f"<title>{escaped(title)}</title>{drawn}</svg>"
    )


def escaped(text: str) -> str:
    """Text escaped for SVG. Control characters, such as a terminal's colours, would make the image invalid: they go."""
    return escape("".join(letter if letter.isprintable() else " " for letter in text))


def moved(x: float, y: float, drawn: str) -> str:
    return f'<g transform="translate({x:.0f},{y:.0f})">{drawn}</g>'


def draw_title(text: str) -> str:
    return f'<text x="0" y="11" font-weight="600" font-size="12">{escaped(text)}</text>'


class Plot:
    """The area between two axes, and where in it a value lies."""

    def __init__(self, area: Box, xs: Range, ys: Range) -> None:
        self.left, self.top, self.right, self.foot = area
        self._xs, self._ys = xs, ys

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * _share(value, self._xs, 0.0)

    def y(self, value: float) -> float:
        return self.top + (self.foot - self.top) * (1 - _share(value, self._ys, 0.5))


def _share(value: float, span: Range, alone: float) -> float:
    """How far between the ends of `span`; `alone`: where they are equal."""
    low, high = span[0] / 2, span[1] / 2  # halves: the difference of the largest floats is infinite
    return (value / 2 - low) / (high - low) if high != low else alone
