"""The browser harness itself: a cell runs in JupyterLab and its output is on the page."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.lab import Notebook

pytestmark = pytest.mark.lab


def test_a_cell_runs_and_is_seen(notebook: Callable[..., Notebook], tmp_path: Path) -> None:
    book = notebook("print('hello from a cell')", "1 / 0", "import time; time.sleep(600)")
    assert book.run(0)[0]["text"] == "hello from a cell\n"
    assert book.page.locator(".jp-OutputArea-output pre").first.inner_text().strip() == "hello from a cell"
    assert book.run(1)[0]["ename"] == "ZeroDivisionError"
    book.start(2)
    book.page.wait_for_function("window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.status === 'busy'")
    book.page.evaluate("window.jupyterapp.commands.execute('notebook:interrupt-kernel')")
    book.wait(2, timeout=10)
    assert book.outputs(2)[0]["ename"] == "KeyboardInterrupt"
    assert book.run(0)[0]["text"] == "hello from a cell\n", "the same cell again"
    assert book.external == []
    picture = tmp_path / "lab.png"
    book.page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000, "an empty page"
