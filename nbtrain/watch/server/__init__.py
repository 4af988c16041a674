"""The Jupyter Server extension: the page of all pools, and the commands of its buttons and the dashboards'.

handlers.py     the routes; each checks who asks and what he may do
pools.py        finds the kernels that have ranks, and asks them
recent_runs.py  the last runs of each notebook, from the history
page.html       the page; its script and style come from nbtrain/static

A kernel never imports it, and it never imports torch.
"""

from __future__ import annotations

from typing import Any


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "nbtrain.watch.server"}]


def _load_jupyter_server_extension(server: Any) -> None:
    from nbtrain.watch.server.handlers import load

    load(server)
