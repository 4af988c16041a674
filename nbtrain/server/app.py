"""Registers the routes with the Jupyter server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jupyter_server.utils import url_path_join

from nbtrain.beacon.kernel_record import FOLDER, KERNEL_ID
from nbtrain.server.handlers import SETTING, Command, EventStream, Page, RunHandler, Static, Which
from nbtrain.server.pools import Pools

STATIC = Path(__file__).parents[1] / "static"


def load(server: Any) -> None:
    """`server`: the ServerApp."""
    application = server.web_app
    # The folder of the kernels' connection files, whatever environment they run in.
    application.settings[SETTING] = Pools(Path(server.runtime_dir) / FOLDER)
    base, kernel = application.settings["base_url"], f"({KERNEL_ID.pattern})"
    application.add_handlers(
        ".*$",
        [
            (url_path_join(base, "nbtrain/?"), Page),
            (url_path_join(base, "nbtrain/static", r"([\w.-]+)"), Static, {"path": str(STATIC)}),
            (url_path_join(base, "nbtrain/api/pools"), Which),
            (url_path_join(base, "nbtrain/api/pools", kernel, "run"), RunHandler),
            (url_path_join(base, "nbtrain/api/pools", kernel, "command"), Command),
            (url_path_join(base, "nbtrain/api/stream"), EventStream),
        ],
    )
    server.log.info("nbtrain: the ranks of all notebooks are at %s", url_path_join(base, "nbtrain"))
