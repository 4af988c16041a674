"""Finds what this machine has, and what of it the ranks get."""
