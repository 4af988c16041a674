"""Ranks on machines that have joined the notebook by themselves, each with the line of `%distributed join`."""

from __future__ import annotations

from nbtrain.engines.remote.pool import RemotePool


class ElasticPool(RemotePool):
    """The first machines that have joined and are free."""
