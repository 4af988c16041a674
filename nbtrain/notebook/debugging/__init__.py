"""Debugging from the notebook: what a rank's pdb asks is asked in the notebook's input line."""
