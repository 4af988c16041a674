"""Keeps what is known of a run, while it goes on and afterwards, in bounded memory; views show it.

feed.py               a run as JSON messages
run_statistics.py     its figures, made of events: rates, time left; NaN and Inf
series.py             a curve of any length in bounded memory; across_ranks.py: those of all ranks as one
training_progress.py  how far a loader and all epochs are
metric_charts.py      which metrics share a chart
log_to.py             `--log-to`
"""
