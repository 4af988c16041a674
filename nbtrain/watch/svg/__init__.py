"""Draws curves over a run and scatter plots as one SVG, without script or style sheet, so that every page that shows a
notebook shows them. All colours are readable on light and on dark ground.

charts.py        several charts (curves.py), with what a step is made of (bars.py) and names (legend.py)
scatter_plot.py  points (dots.py) with names beside them (labels.py); axis_ticks.py: numbers along an axis
base.py          colours, plots, text, the SVG around it all
"""
