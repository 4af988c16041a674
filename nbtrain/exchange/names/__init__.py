"""Finds which names of the notebook a cell reads and binds."""
