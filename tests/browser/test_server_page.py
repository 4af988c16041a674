"""The server's page in a browser: what runs in two notebooks is seen on one page, and stopped from there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.absent import absent
from tests.support.lab import CHROMIUM, Notebook, Server, lab_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, WebSocketRoute

pytestmark = pytest.mark.lab

START = "%load_ext nbtrain\n%distributed start --devices 2"
TRAIN = """%%distributed --devices 2 --monitor off
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
model, optimizer = setup(model, optimizer)
while True:
    loss = model(torch.randn(8, 4)).pow(2).mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    log(loss=loss.item())
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose notebooks keep their history."""
    if CHROMIUM is None:
        absent("no Chromium", "install chromium, or name one in NBTRAIN_CHROMIUM")
    with lab_server(NBTRAIN_HISTORY=str(tmp_path_factory.mktemp("history"))) as server:
        yield server


@pytest.fixture
def overview(lab: Server, browser: Browser) -> Iterator[Page]:
    """The page; it may say nothing in the console and ask nothing of other machines."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    own = (lab.url, lab.url.replace("http", "ws"), "data:")
    page.on("request", lambda asked: None if asked.url.startswith(own) else said.append(asked.url))
    page.goto(f"{lab.url}/nbtrain?token={lab.token}")
    yield page
    page.close()
    assert said == []


@pytest.mark.thorough
@pytest.mark.limit(240)
def test_two_notebooks_on_one_page(notebook: Callable[..., Notebook], overview: Page, lab: Server) -> None:
    overview.get_by_text("No kernel of yours has ranks now").wait_for()
    books = [notebook(START, TRAIN), notebook(START)]
    cards = overview.locator("article")
    for count, book in enumerate(books, 1):
        assert [out for out in book.run(0) if out["output_type"] == "error"] == []
        cards.filter(has_text=f"page-{count - 1}.ipynb").locator("li", has_text="rank 1").wait_for()
        assert cards.count() == count
    trained, idle = cards.filter(has_text="page-0.ipynb"), cards.filter(has_text="page-1.ipynb")
    assert "2 ranks" in trained.inner_text()
    assert "2 notebooks · 4 ranks · " in overview.locator(".nbt-page-head").inner_text()
    assert not re.search(r"kernel [0-9a-f]{8}", overview.locator("main").inner_text())
    link = trained.get_by_role("link", name="page-0.ipynb")
    assert (link.get_attribute("href") or "").endswith("-0.ipynb")
    assert overview.request.get(f"{lab.url}{link.get_attribute('href')}?token={lab.token}").ok
    books[0].start(1)
    trained.locator("canvas").first.wait_for()  # its loss
    idle.get_by_text("idle").wait_for()
    trained.get_by_text("running").first.wait_for()

    trained.get_by_role("button", name="Stacks").click()
    trained.locator(".nbt-said", has_text=re.compile(r"Cell In\[2\], line \d+")).wait_for()
    overview.reload()
    trained.locator("canvas").first.wait_for()
    trained.get_by_role("button", name=re.compile(r"^Stop .*page-0\.ipynb In \[2\]$")).click()
    books[0].wait(1)
    assert "stopped after step" in books[0].outputs(1)[-1]["evalue"]
    trained.get_by_text("stopped").first.wait_for()
    trained.locator("li", has_text="rank 1").wait_for()  # what its ranks go on holding
    trained.locator("summary", has_text="Last run: stopped").click()  # from the history
    assert trained.locator(".nbt-earlier td").nth(3).inner_text() == "ddp"

    books[1].page.evaluate("window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")
    idle.wait_for(state="detached")


def test_what_was_listed_stays_when_no_list_comes(overview: Page) -> None:
    run = {"number": 3, "began": 1.7e9, "cell": 2, "strategy": "ddp", "ranks": 2, "steps": 40, "seconds": 9.5}
    listed = [{"notebook": "one.ipynb", "path": "", "runs": [{**run, "how": "lost", "text": ""}]}]
    answer: list[Any] = [listed]
    streams: list[WebSocketRoute] = []
    overview.route("**/nbtrain/api/runs", lambda route: route.fulfill(json=answer[0]))
    overview.route_web_socket("**/nbtrain/api/stream*", lambda stream: streams.append(stream))
    overview.reload()
    others = overview.locator(".nbt-other")
    others.filter(has_text="one.ipynb").wait_for()
    for answer[0], count in (({"message": "busy"}, 1), ([], 0)):
        with overview.expect_response("**/nbtrain/api/runs"):
            streams[-1].send('{"kernel": "k", "gone": true}')
        overview.wait_for_timeout(300)
        assert others.count() == count
