"""Runs that go on while the notebook is used."""
