"""A run that goes on while the notebook is used."""
