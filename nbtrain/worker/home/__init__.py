"""A rank's side of the exchange with the notebook."""
