"""Measurements. A package by its own, for FairScale installs one of the same name, which would be found instead."""
