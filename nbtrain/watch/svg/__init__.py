"""Draws curves over a run and scatter plots as one SVG, without script or style sheet, so that every page that shows a
notebook shows them. All colours are readable on light and on dark ground."""

from nbtrain.watch.svg.axis_ticks import ticks
from nbtrain.watch.svg.bars import Bar, Bars
from nbtrain.watch.svg.base import (
    BAD,
    COLOURS,
    DISTINCT,
    PLAIN,
    TEXT,
    Picture,
    Words,
    colour,
    image,
    narrow,
    short,
    step,
)
from nbtrain.watch.svg.charts import draw_charts
from nbtrain.watch.svg.curves import BAND, Chart, Curve
from nbtrain.watch.svg.dots import Axis, Dot
from nbtrain.watch.svg.legend import Key, Legend
from nbtrain.watch.svg.scatter_plot import scatter

__all__ = [
    "BAD",
    "BAND",
    "COLOURS",
    "DISTINCT",
    "PLAIN",
    "TEXT",
    "Axis",
    "Bar",
    "Bars",
    "Chart",
    "Curve",
    "Dot",
    "Key",
    "Legend",
    "Picture",
    "Words",
    "colour",
    "draw_charts",
    "image",
    "narrow",
    "scatter",
    "short",
    "step",
    "ticks",
]
