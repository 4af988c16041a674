"""Keeps a rank's modules and packages up to date with their files."""
