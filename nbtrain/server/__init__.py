"""The Jupyter Server extension: the page of all pools, and what its buttons and those of the dashboards ask.

app.py       what is served where
handlers.py  the routes; every one asks who it is and what he may do
pools.py     the kernels that have ranks, found and asked
page.html    the page; its script and style come from nbtrain/static

A kernel never imports it, and it never imports torch.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "nbtrain.server"}]


def _load_jupyter_server_extension(server: Any) -> None:
    from nbtrain.server.app import load

    load(server)
