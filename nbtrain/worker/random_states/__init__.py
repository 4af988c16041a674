"""Random numbers: the same on every rank where one process would draw once, and kept in checkpoints."""
