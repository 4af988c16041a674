"""The dashboard in a browser: what people see of a run, click and are told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.absent import absent
from tests.support.demonstration import demonstration
from tests.support.lab import CHROMIUM, QUIET

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.lab, pytest.mark.thorough]
Open = Callable[..., "Page"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        absent("no Chromium", "install chromium, or name one in NBTRAIN_CHROMIUM")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET)
        yield found
        found.close()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with demonstration() as found:
        yield found


@pytest.fixture
def dashboard(browser: Any, address: str) -> Iterator[Open]:
    """`dashboard("ranks=4&dark")`: open, and the run as far as was asked for. Nothing may be wrong in its console."""
    pages, wrong = [], []

    def open_one(asked: str, width: int = 1000) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda request: None if request.url.startswith(own) else wrong.append(request.url))
        page.goto(f"{address}&{asked}&ticks=20")
        page.wait_for_function("window.demo?.ready")
        settle(page)
        return page

    own = (address.partition("/js/")[0], "data:")
    yield open_one
    for page in pages:
        page.close()
    assert not wrong


def settle(page: Page) -> None:
    """Until all that has come is drawn."""
    page.evaluate("async () => { for (let i = 0; i < 5; i++) await new Promise(requestAnimationFrame); }")


def say(page: Page, message: str) -> None:
    page.evaluate(f"() => window.demo.model.say({message})")
    settle(page)


def sent(page: Page) -> list[dict[str, Any]]:
    return page.evaluate("window.demo.model.sent")


def test_what_is_known_of_a_run_is_shown(dashboard: Open):
    page = dashboard("ranks=3")
    assert page.locator(".nbt-head").inner_text().startswith("▸ running")
    assert page.get_by_role("progressbar").get_attribute("aria-valuetext") == "epoch 1 · 60/1200 · 5 % · 0:38 left"
    rows = [row.inner_text().split("\t") for row in page.locator(".nbt-table tbody tr").all()]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert "waiting for data" in rows[2][1]
    assert rows[1][2] == "60"
    (together,) = page.locator(".nbt-table tfoot tr").all()
    assert "of 25.2 GB" in together.inner_text()
    names = [name.inner_text() for name in page.locator(".nbt-chart-name").all()]
    assert names[:2] == ["loss", "accuracy"]
    assert page.locator(".nbt-ranks button").all_inner_texts() == ["rank 0", "rank 1", "rank 2"]


def test_a_run_that_ended_stays_and_can_no_longer_be_stopped(dashboard: Open):
    page = dashboard("ranks=2&end=failed")
    assert page.locator(".nbt-run-state").inner_text() == "✕ failed"
    assert "out of memory" in page.locator(".nbt-why").inner_text()
    assert page.locator(".nbt-table").inner_text().count("failed: OutOfMemoryError") == 1
    assert page.locator(".nbt-chart canvas").count() == 4
    assert not page.get_by_role("button", name="Stop").is_visible()


def test_what_was_said_goes_with_what_it_was_about(dashboard: Open):
    page = dashboard("ranks=2")
    page.get_by_role("button", name="Stop In [7]").click()
    page.get_by_role("status").filter(has_text="stopping after this step").wait_for()
    page.get_by_role("button", name="Kill In [7]").click()
    say(page, "window.demo.run.end('stopped')")
    assert page.locator(".nbt-said").inner_text() == ""
    assert not page.get_by_text("Kill all ranks?").is_visible()


def test_drawing_can_be_frozen(dashboard: Open):
    page = dashboard("ranks=1")
    freeze = page.get_by_role("button", name="Freeze", exact=True)
    assert freeze.get_attribute("title") == "stop drawing; the run goes on"
    freeze.click()
    say(page, "window.demo.run.news()")
    assert page.locator("td.nbt-step").first.inner_text() == "60"
    assert page.locator(".nbt-figures").inner_text().startswith("frozen · ")
    page.get_by_role("tab", name="Step").click()
    assert page.locator(".nbt-sentence").inner_text(), "a tab that is opened shows what there is"
    assert page.locator(".nbt-split-row").count() == 1
    page.get_by_role("button", name="Unfreeze").click()
    assert page.locator("td.nbt-step").first.inner_text() == "63"
    assert "frozen" not in page.locator(".nbt-figures").inner_text()
    freeze.click()
    say(page, "window.demo.run.end('done')")
    assert "✓done" in page.locator(".nbt-table").inner_text(), "the end is always shown"


NOTIFICATION = """() => {
    window.told = [];
    window.Notification = class {
        constructor(title, { body }) { window.told.push([title, body]); }
        static permission = "default";
        static async requestPermission() { return (this.permission = "granted"); } };
    Object.defineProperty(document, "hidden", { get: () => true, configurable: true });
    document.hasFocus = () => false; }"""


def test_the_browser_tells_of_the_end_of_a_long_run_once_it_was_allowed_to(dashboard: Open):
    page = dashboard("ranks=2&ticks=700")
    page.evaluate(NOTIFICATION)
    page.get_by_role("button", name="Notify").click()
    page.get_by_role("button", name="Notify").wait_for(state="hidden")
    say(page, "window.demo.run.end('done')")
    assert page.evaluate("window.told") == [["In [7]: done after 1:10", "ddp · 2 ranks · cpu · batch 32 × 2"]]
    assert page.title() == "✓ done · nbtrain: the front end"
    page.evaluate("() => { delete document.hidden; document.dispatchEvent(new Event('visibilitychange')); }")
    assert page.title() == "nbtrain: the front end"


def test_a_screen_reader_hears_the_end_also_when_a_picture_has_taken_its_place(dashboard: Open):
    page = dashboard("ranks=2")
    heard = page.locator("body > .nbt-heard")
    assert heard.first.inner_text().startswith("In [7] is running: ddp · 2 ranks")
    page.evaluate("window.demo.close()")
    say(page, "window.demo.run.end('failed', 'rank 1: ValueError')")
    assert heard.nth(1).inner_text() == "In [7]: failed after 0:02. rank 1: ValueError"
    assert heard.nth(1).get_attribute("role") == "alert"


def test_every_rank_is_one_line(dashboard: Open):
    for width in (360, 500, 1200, 2560):
        page = dashboard("ranks=8&gpu&long", width)
        heights = page.evaluate("[...document.querySelectorAll('.nbt-table tr')].map(row => row.offsetHeight)")
        assert len(heights) == 10
        assert max(heights) <= 26, (width, heights)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


# Every letter that is seen, and how far its colour is from what is behind it.
CONTRAST = """() => {
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = (colour) => { const [r, g, b] = parts(colour).map((c) => {
        const part = c / 255; return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const behind = (node) => { for (let at = node; at; at = at.parentElement) {
        const colour = getComputedStyle(at).backgroundColor;
        if ((parts(colour)[3] ?? 1) === 1) return colour; } return "rgb(255, 255, 255)"; };
    const found = [];
    const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement, words = walker.currentNode.data.trim();
        if (!words || !node.checkVisibility()) continue;
        const [a, b] = [getComputedStyle(node).color, behind(node)].map(light).sort((x, y) => x - y);
        found.push([words, (b + 0.05) / (a + 0.05)]); }
    return found; }"""


@pytest.mark.parametrize("ground", ["light", "dark"])
@pytest.mark.parametrize(
    "asked", ["ranks=3&gpu&slow=1", "ranks=2&nan=399&ticks=200&end=done", "ranks=2&end=failed", "page&ranks=2"]
)
def test_every_word_can_be_read(dashboard: Open, asked: str, ground: str):
    """WCAG AA: 4.5 to 1."""
    page = dashboard(f"{asked}{'&dark' * (ground == 'dark')}")
    page.emulate_media(color_scheme=ground)
    settle(page)
    for tab in page.get_by_role("tab").all():
        tab.click()
        settle(page)
        found = page.evaluate(CONTRAST)
        assert len(found) > 20
        assert [one for one in found if one[1] < 4.5] == []


def test_every_control_has_a_name_and_is_reached_by_tab(dashboard: Open):
    page = dashboard("page&ranks=2")
    names = page.evaluate("""[...document.querySelectorAll("button, a[href], summary, [tabindex='0']")]
        .filter((node) => node.checkVisibility() && node.tabIndex === 0)
        .map((node) => node.getAttribute("aria-label") || node.textContent.trim())""")
    assert all(names)
    assert {f"{name} digits.ipynb In [7]" for name in ("Stop", "Stacks", "Kill")} <= set(names)
    reached = set()
    for _ in range(len(names) + 2):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.textContent")
        )
    assert set(names) <= reached


def test_colours_that_the_user_chooses_hide_nothing(dashboard: Open):
    page = dashboard("ranks=2")
    page.emulate_media(forced_colors="active")
    bar = "getComputedStyle(document.querySelector('tbody .nbt-bar > i')).backgroundColor"
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(bar) != page.evaluate(ground)
    assert page.evaluate("getComputedStyle(document.querySelector('tbody .nbt-bar')).outlineStyle") == "solid"
    page.emulate_media(forced_colors="none", contrast="more")
    soft = "getComputedStyle(document.querySelector('.nbt-figures')).color"
    assert page.evaluate(soft) == page.evaluate("getComputedStyle(document.querySelector('.nbt-title')).color")


def test_before_anything_is_known_words_say_so(dashboard: Open):
    page = dashboard("empty")
    assert "no news of a run yet" in page.locator(".nbt-head").inner_text()
    assert "log(loss=loss)" in page.locator(".nbt-empty:visible").inner_text()
    assert [message["kind"] for message in sent(page)] == ["hello"]


def test_to_kill_is_asked_once_more(dashboard: Open):
    page = dashboard("ranks=2")
    page.get_by_role("button", name="Kill In [7]").click()
    assert page.evaluate("document.activeElement.textContent") == "No"
    page.keyboard.press("Enter")
    assert not page.get_by_role("button", name="Kill them").is_visible()
    assert not any(message["kind"] == "command" for message in sent(page))
    page.get_by_role("button", name="Kill In [7]").click()
    page.get_by_role("button", name="Kill them").click()
    page.get_by_role("status").filter(has_text="killed").wait_for()
    assert [message["command"] for message in sent(page) if message["kind"] == "command"] == ["kill"]


def test_the_keyboard_goes_from_tab_to_tab_and_the_choice_stays(dashboard: Open):
    page = dashboard("ranks=2")
    page.get_by_role("tab", name="Metrics").focus()
    page.keyboard.press("ArrowLeft")
    assert page.get_by_role("tab", selected=True).inner_text() == "Step"
    assert "of a step is waiting for data: raise num_workers" in page.locator(".nbt-sentence").inner_text()
    say(page, "window.demo.run.news()")
    assert page.get_by_role("tab", selected=True).inner_text() == "Step"


def test_a_chart_is_zoomed_and_shown_whole_again(dashboard: Open):
    page = dashboard("ranks=2")
    over = page.locator(".nbt-chart .u-over").first
    box = over.bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 120, box["y"] + 40, steps=3)
    page.mouse.up()
    settle(page)
    assert page.get_by_role("button", name="show all").count() == 4  # every chart of that x
    assert page.get_by_role("button", name="show all").first.is_visible()
    assert page.locator(".nbt-tip:visible").inner_text().startswith("step ")
    page.get_by_role("button", name="show all").first.click()
    settle(page)
    assert not page.get_by_role("button", name="show all").first.is_visible()


def chart(page: Page, title: str) -> Any:
    return page.get_by_role("group", name=title, exact=True)


def said(page: Page, title: str) -> list[str]:
    """The legend of a chart."""
    return chart(page, title).locator(".nbt-chart-value").all_inner_texts()


def inked(page: Page, title: str) -> int:
    """Pixels of a chart that have a colour."""
    return page.evaluate(
        """(node) => { const c = node.querySelector("canvas"), { width, height } = c;
        const { data } = c.getContext("2d").getImageData(0, 0, width, height);
        let found = 0;
        for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] > 60 && Math.max(...data.slice(i, i + 3)) - Math.min(...data.slice(i, i + 3)) > 40) found++;
        return found; }""",
        chart(page, title).element_handle(),
    )


def test_ranks_are_a_mean_in_a_band_and_a_button_shows_one(dashboard: Open):
    page = dashboard("ranks=8&metrics=2")
    assert [re.sub(r"[\d.]+", "N", text) for text in said(page, "loss")] == ["now N (N–N across ranks)"]
    before = inked(page, "loss")
    button = page.get_by_role("button", name="rank 3")
    assert button.get_attribute("aria-pressed") == "false"
    button.focus()
    page.keyboard.press("Enter")
    settle(page)
    assert button.get_attribute("aria-pressed") == "true"
    assert inked(page, "loss") > before
    chart(page, "accuracy").locator(".u-over").hover()
    assert "rank 3" in page.locator(".nbt-tip:visible").inner_text()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"


def test_what_is_not_finite_is_said_and_marked(dashboard: Open):
    page = dashboard("ranks=4&metrics=1&nan=30")
    assert "now NaN on rank 3, others " in said(page, "loss")[0]
    red = """(node) => { const c = node.querySelector("canvas");
        const { data } = c.getContext("2d").getImageData(0, 0, c.width, c.height / 4);
        for (let i = 0; i < data.length; i += 4)
            if (data[i] > 150 && data[i + 1] < 80 && data[i + 3] > 200) return true;
        return false; }"""
    assert page.evaluate(red, chart(page, "loss").element_handle())


def test_smoothing_and_log_scale_are_for_all_charts(dashboard: Open):
    page = dashboard("ranks=2&metrics=2")
    lines = "() => document.querySelectorAll('.nbt-chart .uplot').length"
    page.get_by_role("slider", name="smoothing").fill("0.9")
    log = page.get_by_role("button", name="log scale")
    log.click()
    settle(page)
    assert log.get_attribute("aria-pressed") == "true"
    assert page.evaluate(lines) == 2
    assert page.locator(".nbt-weight").inner_text() == "0.9"
    assert said(page, "accuracy")[-1] == "values ≤ 0 are not on a log scale"
    assert len(said(page, "loss")) == 1


def test_the_keyboard_moves_zooms_and_comes_back(dashboard: Open):
    page = dashboard("ranks=2&metrics=2")
    page.get_by_role("group", name="curve of loss").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    settle(page)
    assert page.locator(".nbt-chart-place:visible").all_inner_texts() == ["step 59", "step 59"]  # all charts of that x
    assert page.locator(".nbt-tip:visible").count() == 1
    heard = chart(page, "loss").get_by_role("status").inner_text()
    assert re.fullmatch(r"step 59, [\d.]+ \([\d.]+–[\d.]+ across ranks\)", heard)
    page.keyboard.press("+")
    settle(page)
    assert page.get_by_role("button", name="show all").count() == 2
    page.keyboard.press("Escape")
    settle(page)
    assert page.get_by_role("button", name="show all").count() == 0
    page.keyboard.press("Tab")
    assert page.locator(".nbt-tip:visible").count() == 0


def test_a_double_click_and_a_button_show_a_chart_in_full_size(dashboard: Open):
    page = dashboard("ranks=2&metrics=2")
    before = chart(page, "loss").bounding_box()
    page.locator(".nbt-chart .u-over").first.dblclick()
    settle(page)
    full = page.get_by_role("dialog", name="loss")
    large = full.locator("canvas").bounding_box()
    assert large["height"] > 600
    say(page, "window.demo.run.news()")
    page.keyboard.press("Escape")
    settle(page)
    assert page.get_by_role("dialog").count() == 0
    assert chart(page, "loss").bounding_box() == before
    page.get_by_role("button", name="full size").last.click()
    page.get_by_role("button", name="back to the page").click()
    settle(page)
    names = [name.inner_text() for name in page.locator(".nbt-chart-name:visible").all()]
    assert names == ["loss", "accuracy"]


def test_a_chart_is_copied_as_csv(dashboard: Open):
    page = dashboard("ranks=2&metrics=1")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="copy").click()
    page.get_by_role("button", name="copied").wait_for()
    lines = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert (lines[0], len(lines)) == ("step,loss rank 0,loss rank 1", 61)
    assert lines[60].startswith("60,")


def test_an_earlier_run_is_laid_over_this_one(dashboard: Open):
    page = dashboard("ranks=2&metrics=2&earlier")
    select = page.get_by_label("compare with")
    assert select.locator("option").all_inner_texts() == [
        "no other run",
        "run 3 · ddp · loss 0.23",
        "run 2 · ddp · loss 0.22",
    ]
    select.select_option("3")
    page.locator(".nbt-chart-value", has_text="run 3").first.wait_for()
    assert [message for message in sent(page) if message["kind"] == "compare"] == [{"kind": "compare", "run": 3}]
    select.select_option("")
    settle(page)
    assert page.locator(".nbt-chart-value", has_text="run 3").count() == 0


def test_light_and_dark_follow_the_page_at_once(dashboard: Open):
    page = dashboard("ranks=2")
    dark = page.locator(".nbt-root.nbt-dark")
    assert dark.count() == 0
    page.evaluate("document.body.classList.add('dark')")
    dark.wait_for()


def test_a_narrow_window_is_enough(dashboard: Open):
    page = dashboard("ranks=4&gpu&long", 360)
    for tab in page.get_by_role("tab").all():
        tab.click()
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_names_are_text_whatever_they_are(dashboard: Open):
    page = dashboard("ranks=1")
    name = "<img src=x onerror=alert(1)>"
    say(page, f"{{kind: 'news', seq: 21, now: 3, points: {{'metric/{name}/0': [[1], [2]]}}, ranks: []}}")
    assert page.locator(".nbt-chart-name:visible").last.inner_text() == name
    assert page.locator("img").count() == 0


def test_a_view_that_is_closed_leaves_nothing_and_another_one_knows_all(dashboard: Open):
    page = dashboard("ranks=2")
    page.evaluate("window.demo.close()")
    assert page.locator(".nbt-root").count() == 0
    say(page, "window.demo.run.news()")
    page.evaluate("() => { window.demo.show(); }")
    settle(page)
    assert page.locator("td.nbt-step").first.inner_text() == "63"


def test_a_lost_connection_is_said_and_comes_back(dashboard: Open):
    page = dashboard("page&ranks=2")
    assert page.locator("article h2").all_inner_texts() == ["digits.ipynb", "a kernel without a notebook"]
    page.evaluate("window.demo.socket.dispatchEvent(new Event('close'))")
    page.get_by_role("status").filter(has_text="trying again in 0.5 s").wait_for()
    page.get_by_role("status").filter(has_text="No kernel of yours has ranks now").wait_for()
    assert page.locator("article").count() == 0  # the server tells all of them anew
    page.evaluate("window.demo.tell()")
    assert page.locator("article").count() == 2
