"""Shows that a run of the tests moves: a line every five seconds, in place of a dot for each test."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

EVERY = 5.0


class Progress:
    """Of the process that shows the results, whether it plays the tests itself or has others do so."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._begun = time.monotonic()
        self._done = 0
        self._all = 0
        self._over = threading.Event()
        self._shown = threading.Thread(target=self._show, daemon=True)

    def pytest_sessionstart(self) -> None:
        self._shown.start()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._all = max(self._all, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._all = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._done += report.when == "teardown"

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dot for what passed."""
        return ("passed", "", "PASSED") if report.passed and report.when == "call" else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._over.set()
        self._shown.join()

    def _show(self) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        while not self._over.wait(EVERY):
            minutes, seconds = divmod(round(time.monotonic() - self._begun), 60)
            tests = f"{self._done:,} of {self._all:,} tests" if self._all else "looking for tests"
            terminal.ensure_newline()
            terminal.write_line(f"{minutes}:{seconds:02} · {tests}", flush=True)
