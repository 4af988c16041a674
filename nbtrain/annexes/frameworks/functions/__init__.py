"""Functions that are called in an ordinary cell and run on the ranks: `run`, `predict`, and the launchers of others."""
