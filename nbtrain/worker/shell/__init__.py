"""Runs cells on a rank, and sends their output and figures."""
