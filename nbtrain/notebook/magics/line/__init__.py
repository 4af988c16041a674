"""Reads a magic's line: from what is typed to what is run."""
