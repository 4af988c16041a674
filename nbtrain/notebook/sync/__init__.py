"""Keeps the notebook and the ranks alike."""
