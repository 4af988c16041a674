"""JupyterLab in a headless Chromium: what a user sees, clicks and waits for.

    def test_something(notebook):
        page = notebook("print('hello')", "1 / 0")     # a notebook with two cells, open and its kernel idle
        page.run(0)
        assert page.outputs(0)[0]["text"] == "hello\\n"
        page.page.locator("button").click()            # the Playwright page itself

Cells are run through JupyterLab's own commands, not with key strokes: a Shift+Enter right after
loading may run nothing at all. A failing test leaves a screenshot, named in its report.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.absent import absent
from tests.support.kernels import private_environment, private_home

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, [os.environ.get("NBTRAIN_CHROMIUM"), *map(shutil.which, _NAMES)]), None)
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
SETTINGS = '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}'

_READY = """() => {
    const panel = window.jupyterapp?.shell?.currentWidget, session = panel?.sessionContext;
    return panel?.context?.isReady && session?.isReady && session.session?.kernel?.status === 'idle'; }"""
_START = """(index) => {
    const cells = window.jupyterapp.shell.currentWidget.content;
    cells.deselectAll(); cells.activeCellIndex = index; window.jupyterapp.commands.execute('notebook:run-cell'); }"""
_RAN = """(index) => {
    const cell = window.jupyterapp.shell.currentWidget.content.widgets[index].model;
    return cell.executionCount !== null && (cell.executionState ?? 'idle') === 'idle'; }"""
_FORGET = "(index) => { window.jupyterapp.shell.currentWidget.content.widgets[index].model.clearExecution(); }"
_OUTPUTS = "(index) => window.jupyterapp.shell.currentWidget.content.widgets[index].model.outputs.toJSON()"
_SHUTDOWN = "window.jupyterapp.shell.currentWidget.sessionContext.shutdown()"


@dataclass(frozen=True, slots=True)
class Server:
    """A JupyterLab that serves `root`."""

    url: str
    token: str
    root: Path


@contextmanager
def lab_server(*options: str, **environ: str) -> Iterator[Server]:
    """JupyterLab on a free port, in a home of its own, ready when this yields. `environ`: its own, and its kernels'."""
    with private_home() as home, open(home / "lab.log", "w+") as log, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port, token, root = probe.getsockname()[1], secrets.token_hex(16), home / "notebooks"
        probe.close()
        root.mkdir()
        overrides = home / "config" / "labconfig" / "default_setting_overrides.json"
        overrides.parent.mkdir(parents=True)
        overrides.write_text(SETTINGS)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
                *(f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}"),
                *(f"--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"),
                *("--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", *options),
            ],
            env={**private_environment(home), **environ}, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_it_answers(f"{url}/api/status?token={token}", process, home / "lab.log")
            yield Server(url, token, root)
        finally:
            process.send_signal(signal.SIGTERM)  # clean: kernels are shut down too; SIGINT would ask
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            answer.read()
            return
        time.sleep(0.05)
    raise RuntimeError(f"JupyterLab did not come up; it says:\n{log.read_text()}")


class Notebook:
    """A notebook open in JupyterLab, its kernel idle."""

    def __init__(self, browser: Browser, server: Server, path: str) -> None:
        self.console: list[tuple[str, str]] = []
        """(type, text) of the browser's console, uncaught errors as "pageerror"."""
        self.external: list[str] = []
        """Requests that left this machine; there should be none."""
        self.page = browser.new_page(viewport={"width": 1200, "height": 900})
        own = (server.url, server.url.replace("http", "ws"), "data:", "blob:")
        self.page.on("console", lambda said: self.console.append((said.type, said.text)))
        self.page.on("pageerror", lambda error: self.console.append(("pageerror", str(error))))
        self.page.on("request", lambda asked: None if asked.url.startswith(own) else self.external.append(asked.url))
        self.page.goto(f"{server.url}/lab/tree/{path}?token={server.token}&reset", wait_until="domcontentloaded")
        self.page.wait_for_function(_READY, timeout=60_000)
        self.page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-CodeCell", timeout=30_000)

    def start(self, index: int) -> None:
        """Fire a cell and do not wait."""
        self.page.evaluate(_FORGET, index)
        self.page.evaluate(_START, index)

    def wait(self, index: int, timeout: float = 60) -> None:
        self.page.wait_for_function(_RAN, arg=index, timeout=timeout * 1000)

    def run(self, index: int, timeout: float = 60) -> list[dict[str, Any]]:
        self.start(index)
        self.wait(index, timeout)
        return self.outputs(index)

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """The cell's outputs as they would be saved."""
        return self.page.evaluate(_OUTPUTS, index)

    def close(self) -> None:
        self.page.evaluate(_SHUTDOWN)
        self.page.close()


@pytest.fixture(scope="session")
def lab() -> Iterator[Server]:
    if CHROMIUM is None:
        absent("no Chromium", "install chromium, or name one in NBTRAIN_CHROMIUM")
    with lab_server() as server:
        yield server


@pytest.fixture(scope="module")
def browser(lab: Server) -> Iterator[Browser]:
    """Per module: while it is there, Playwright owns this thread's event loop and kernels cannot be driven."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        yield found
        found.close()


@pytest.fixture
def notebook(lab: Server, browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Notebook]]:
    """`notebook(cell, cell, ...)` opens a new notebook with these cells."""
    import nbformat

    opened: list[Notebook] = []

    def open_one(*cells: str) -> Notebook:
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = lab.root / f"{request.node.name}-{len(opened)}.ipynb"
        nbformat.write(book, path)
        opened.append(Notebook(browser, lab, path.name))
        return opened[-1]

    yield open_one
    failed = request.node.stash.get(FAILED, False)
    for number, found in enumerate(opened):
        if failed:
            picture = request.config.rootpath / "build" / f"{request.node.name}-{number}.png"
            found.page.screenshot(path=picture)
            request.node.add_report_section("teardown", "screenshot", str(picture))
        found.close()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report
