"""Tries a cell to measure or compare it; nothing of a trial comes home."""
