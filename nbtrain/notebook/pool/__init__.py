"""Starts, keeps, replaces and ends the notebook's ranks."""
