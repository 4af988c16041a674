"""The routes. Each checks who asks, and with the server's authorizer what he may do with the resource "nbtrain".

A route takes the id of a kernel and one of a few commands: no process, no path, no address.
"""

from __future__ import annotations

import asyncio
import html
import json
from collections.abc import Awaitable
from pathlib import Path
from string import Template
from typing import Any

from jupyter_server.auth.decorator import authorized, ws_authenticated
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado import web, websocket

from nbtrain.watch.beacon.kernel_record import FOLDER, KERNEL_ID
from nbtrain.watch.beacon.listener import COMMANDS
from nbtrain.watch.server.pools import NoAnswer, NoPool, Pools
from nbtrain.watch.server.recent_runs import recent_runs

RESOURCE = "nbtrain"
SETTING = "nbtrain_pools"
UNSENT = 1000
"""Messages that a browser may leave unread, half a minute of a few runs. With one more it has to connect again."""
OWN = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "form-action 'none'; base-uri 'none'"
)
STATIC = Path(__file__).parents[2] / "static"
PAGE = Template(Path(__file__).with_name("page.html").read_text())
TYPES = {".js": "text/javascript", ".css": "text/css"}


class ApiHandler(APIHandler):
    auth_resource = RESOURCE

    @property
    def pools(self) -> Pools:
        of_server: Pools = self.settings[SETTING]
        return of_server

    async def ask(self, kernel: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.pools.ask(kernel, request)
        except NoPool:
            raise web.HTTPError(404, f"kernel {kernel} has no ranks") from None
        except NoAnswer:
            raise web.HTTPError(504, f"kernel {kernel} does not answer: it is stopped, or busy in C code") from None


class PoolsHandler(ApiHandler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        self.finish(json.dumps(await self.pools.abouts()))


class RunHandler(ApiHandler):
    @web.authenticated
    @authorized
    async def get(self, kernel: str) -> None:
        run = (await self.ask(kernel, {"command": "run"})).get("run")
        if run is None:
            raise web.HTTPError(404, f"kernel {kernel} has run no cell on its ranks")
        self.finish(json.dumps(run))


class CommandHandler(ApiHandler):
    @web.authenticated
    @authorized(action="execute")
    async def post(self, kernel: str) -> None:
        try:
            asked = json.loads(self.request.body)
            command, run = asked["command"], asked.get("run")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            command = run = None
        if not isinstance(command, str) or command not in COMMANDS:
            raise web.HTTPError(400, f"the command is one of {', '.join(COMMANDS)}")
        if run is not None and not (isinstance(run, str) and KERNEL_ID.fullmatch(run)):
            raise web.HTTPError(400, "run is the id of a run")
        self.finish(json.dumps(await self.ask(kernel, {"command": command, "run": run})))


class RecentRunsHandler(ApiHandler):
    @web.authenticated
    @authorized
    async def get(self) -> None:
        root = Path(self.serverapp.root_dir) if self.serverapp is not None else Path()
        self.finish(json.dumps(await asyncio.to_thread(recent_runs, root)))  # the disk may be slow


class StreamHandler(WebSocketMixin, websocket.WebSocketHandler, JupyterHandler):
    """Sends the messages of all kernels to one browser."""

    auth_resource = RESOURCE

    @ws_authenticated
    @authorized
    async def get(self) -> None:
        await super().get()

    def open(self) -> None:
        super().open()
        self._unsent: asyncio.Queue[str] = asyncio.Queue(UNSENT)
        self._sending = asyncio.ensure_future(self._send())
        self._pools: Pools = self.settings[SETTING]
        self._pools.join(self)

    def take(self, message: str) -> None:
        """Queue a message for this browser; never waits."""
        try:
            self._unsent.put_nowait(message)
        except asyncio.QueueFull:
            self._pools.leave(self)
            self.close(1013, "too slow")

    async def _send(self) -> None:
        try:
            while True:
                await self.write_message(await self._unsent.get())
        except websocket.WebSocketClosedError:
            pass

    def on_message(self, message: str | bytes) -> None:
        try:
            kernel = json.loads(message)["again"]
        except (ValueError, KeyError, TypeError, RecursionError):
            kernel = None
        if isinstance(kernel, str) and KERNEL_ID.fullmatch(kernel):
            self._pools.again(self, kernel)
        else:
            self.close(1008, 'nothing can be said here but {"again": kernel id}')

    def on_close(self) -> None:
        if hasattr(self, "_pools"):
            self._pools.leave(self)
            self._sending.cancel()
        super().on_close()


class PageHandler(JupyterHandler):
    auth_resource = RESOURCE

    @web.authenticated
    @authorized
    def get(self) -> None:
        _ = self.xsrf_token  # sets the cookie that the page's commands have to show
        opens = shows_notebooks(self.serverapp.default_url if self.serverapp is not None else "")
        config = json.dumps({"baseUrl": self.base_url, "opens": opens}).replace("<", "\\u003c")
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(PAGE.substitute(static=html.escape(self.base_url + "nbtrain/static/"), config=config))

    @property
    def content_security_policy(self) -> str:
        """Allow nothing from other places, and only the page's own script and style files."""
        return f"{super().content_security_policy}; {OWN}"


def shows_notebooks(default_url: str) -> str:
    """Where a server with this first page shows a notebook. JupyterLab's may have `tree` in it, too: /lab/tree/work."""
    return "notebooks/" if default_url.startswith(("/tree", "/notebooks")) else "lab/tree/"


class StaticHandler(JupyterHandler, web.StaticFileHandler):
    """The page's script and style."""

    auth_resource = RESOURCE

    @web.authenticated
    @authorized
    def get(self, path: str) -> Awaitable[None]:  # type: ignore[override]  # StaticFileHandler's has one argument more
        return web.StaticFileHandler.get(self, path)

    @web.authenticated
    @authorized
    def head(self, path: str) -> Awaitable[None]:  # type: ignore[override]  # StaticFileHandler's has one argument more
        return web.StaticFileHandler.get(self, path, False)

    def get_content_type(self) -> str:
        return TYPES.get(Path(self.absolute_path or "").suffix, "application/octet-stream")

    def set_extra_headers(self, path: str) -> None:
        self.set_header("Cache-Control", "no-cache")  # the browser asks each time whether it has changed


def load(server: Any) -> None:
    """Register the routes with the server, a ServerApp."""
    application = server.web_app
    # The folder of the kernels' connection files, whatever environment they run in.
    application.settings[SETTING] = Pools(Path(server.runtime_dir) / FOLDER)
    base, kernel = application.settings["base_url"], f"({KERNEL_ID.pattern})"
    application.add_handlers(
        ".*$",
        [
            (url_path_join(base, "nbtrain/?"), PageHandler),
            (url_path_join(base, "nbtrain/static", r"([\w.-]+)"), StaticHandler, {"path": str(STATIC)}),
            (url_path_join(base, "nbtrain/api/pools"), PoolsHandler),
            (url_path_join(base, "nbtrain/api/pools", kernel, "run"), RunHandler),
            (url_path_join(base, "nbtrain/api/pools", kernel, "command"), CommandHandler),
            (url_path_join(base, "nbtrain/api/runs"), RecentRunsHandler),
            (url_path_join(base, "nbtrain/api/stream"), StreamHandler),
        ],
    )
    server.log.info("nbtrain: the ranks of all notebooks are at %s", url_path_join(base, "nbtrain"))
