"""Tries a cell to measure or compare it (compare_trials.py: `--compare`, `--find-batch`, `--find-model`); nothing of a
trial comes home."""
