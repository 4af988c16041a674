"""Modules and packages on a rank, and whether they are still what the notebook has."""
