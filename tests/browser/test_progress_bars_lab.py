"""Progress bars of ranks in JupyterLab: drawn as its own widgets, below the dashboard, and red where a cell fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.lab import Notebook

pytestmark = [pytest.mark.lab, pytest.mark.thorough]

SETUP = """%load_ext nbtrain
import time
from tqdm.auto import tqdm, trange
%distributed start -d 4"""

BARS = """%%distributed -d 4 -s none
for epoch in trange(2, desc='epochs'):
    for step in tqdm(range(40), desc='steps', leave=False):
        log(loss=1 / (step + 1))
        time.sleep(0.05)
    print('epoch', epoch)
if rank: print('rank', rank)"""

FAILS = """%%distributed -d 4 -s none
for step in tqdm(range(40)):
    if step == 10: raise ValueError('no')"""

PLACES = """index => {
    const outputs = [...document.querySelectorAll('.jp-Notebook .jp-Cell')][index]
        .querySelectorAll('.jp-OutputArea-child');
    return [...outputs].map(output =>
        output.querySelector('.nbt-board') ? 'dashboard' :
        output.querySelector('img[alt=charts]') ? 'picture' :
        output.querySelector('.progress-bar') ? 'bar' :
        output.querySelector('details') ? 'details' :
        output.querySelector('pre') ? 'text' : 'nothing');
}"""
RED = "document.querySelectorAll('.progress-bar.bg-danger, .progress-bar-danger').length"


def test_bars_stand_below_the_dashboard(notebook: Callable[..., Notebook], tmp_path: Path) -> None:
    page = notebook(SETUP, BARS, FAILS)
    page.run(0)
    page.start(1)
    page.page.wait_for_function(f"({PLACES})(1)[0] === 'dashboard'")
    page.page.wait_for_function(f"({PLACES})(1).filter(place => place === 'bar').length === 2")
    picture = tmp_path / "bars.png"
    page.page.screenshot(path=picture)
    assert picture.stat().st_size > 10_000, "an empty page"
    seen = page.page.evaluate(PLACES, 1)
    assert seen[:2] == ["dashboard", "bar"]
    assert set(seen[1:]) <= {"bar", "text", "nothing"}
    page.wait(1)
    page.page.wait_for_function(f"({PLACES})(1)[0] === 'picture'")
    seen = [place for place in page.page.evaluate(PLACES, 1) if place != "nothing"]
    assert list(dict.fromkeys(seen)) == ["picture", "bar", "text", "details"]
    assert seen.count("bar") == 1, "the inner ones are gone"
    folded = page.page.locator(".jp-OutputArea-child details")
    assert folded.locator("summary").inner_text() == "ranks 1, 2, 3 printed something different (3 lines)"
    assert not folded.locator("pre").is_visible()
    folded.locator("summary").click()
    assert folded.locator("pre").inner_text().splitlines() == ["[rank 1] rank 1", "[rank 2] rank 2", "[rank 3] rank 3"]
    page.run(2)
    bar = page.page.locator(".jp-Notebook .jp-Cell").nth(2).locator(".progress-bar")
    bar.wait_for()
    page.page.wait_for_function(f"{RED} === 1")
    assert page.external == []
    assert not [said for said in page.console if said[0] in ("pageerror", "error")]
