"""The strategy picker as its user has it: in JupyterLab, choosing, measuring, using, and running the next cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.demonstration import demonstration
from tests.support.lab import Notebook

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.lab, pytest.mark.thorough]
Open = Callable[..., "Page"]

SETUP = """%load_ext nbtrain
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(640, 64), torch.randint(10, (640,)))
loader = torch.utils.data.DataLoader(data, batch_size=16)"""
LOOP = """for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
print("ranks:", world_size)"""
SOURCE = "window.jupyterapp.shell.currentWidget.content.widgets[{}].model.sharedModel.getSource()"
LINE = "document.querySelector('.nbt-pick-line')?.textContent"
SAID = "document.querySelector('.nbt-pick-said')?.textContent"


def _picked(page: Page) -> None:
    page.wait_for_selector(".nbt-pick-why:not(:empty)", timeout=60_000)


def _line(page: Page, words: str) -> None:
    page.wait_for_function(f"{LINE} === {words!r}", timeout=60_000)


@pytest.mark.limit(300)
def test_choose_measure_use_and_run(notebook: Callable[..., Notebook]) -> None:
    book = notebook(SETUP, "%distributed pick -d 2", f"%%time\n%%distributed --split-batches\n{LOOP}", "%distributed")
    page = book.page
    book.run(0)
    book.run(1)
    _picked(page)
    _line(page, "%%distributed --strategy ddp --devices 2")

    page.locator(".nbt-pick-card", has=page.get_by_text("zero1", exact=True)).click()
    _line(page, "%%distributed --strategy zero1 --devices 2")
    page.get_by_label("bucket-mb").fill("5")
    _line(page, "%%distributed --strategy zero1 --devices 2 --bucket-mb 5")

    # Only what is ticked is measured.
    for name in ("ddp", "zero1", "sharded"):
        box = page.locator(".nbt-pick-card", has=page.get_by_text(name, exact=True)).get_by_label("measure")
        if box.count():
            box.set_checked(name != "sharded")
    page.get_by_role("button", name="Measure 2").click()
    page.wait_for_selector(".nbt-pick-verdict:not(:empty)", timeout=120_000)
    names = page.locator(".nbt-pick-compared tbody td:first-child").all_text_contents()
    assert [name.replace(" ★", "") for name in names] == ["ddp", "zero1 --bucket-mb 5"]
    verdict = page.locator(".nbt-pick-verdict").inner_text()
    starred = sum("★" in name for name in names)
    assert verdict.startswith("use: %%distributed --strategy " if starred else "too close to call: ddp and zero1")
    assert "±" in page.locator(".nbt-pick-compared tbody").inner_text()
    page.locator(".nbt-pick-compared tbody tr", has_text="zero1").get_by_role("button", name="Select").click()
    _line(page, "%%distributed --strategy zero1 --devices 2 --bucket-mb 5")
    page.wait_for_function("document.querySelector('.nbt-pick-picture').naturalWidth > 100")

    page.get_by_role("button", name="Use in the next cell").click()
    page.wait_for_function(f"{SAID}.startsWith('The line is in the next cell.')", timeout=60_000)
    line = "%%distributed --strategy zero1 --devices 2 --bucket-mb 5"
    assert page.evaluate(SOURCE.format(2)) == f"%%time\n{line} --split-batches\n{LOOP}"
    assert "ranks: 2" in "".join(output.get("text", "") for output in book.run(2, timeout=120))
    assert "--strategy zero1 --devices 2 --bucket-mb 5" in book.run(3)[0]["text"]

    # A second time its own line is replaced; and what was just typed is in it.
    page.get_by_label("bucket-mb").fill("7")
    page.get_by_role("button", name="Use in the next cell").click()
    page.wait_for_function(f"{SAID}.includes('--bucket-mb 7')", timeout=60_000)
    assert page.evaluate(SOURCE.format(2)) == f"%%time\n{line.replace('5', '7')} --split-batches\n{LOOP}"
    assert page.locator(".nbt-pick-do").get_by_text("of the last cell").count() == 1
    assert book.external == []
    assert not [said for said in book.console if said[0] == "pageerror"]


@pytest.mark.limit(300)
def test_it_is_still_there_when_the_page_was_loaded_again_and_stops(notebook: Callable[..., Notebook]) -> None:
    book = notebook(SETUP + "\nx, y = next(iter(loader))\nimport time", "%distributed pick -d 2", "%%bash\nls")
    page = book.page
    book.run(0)
    book.run(1)
    _picked(page)
    # Arrows are the form's, not the notebook's.
    page.locator(".nbt-pick-card.nbt-chosen input[type=radio]").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function(f"{LINE} !== '%%distributed --strategy ddp --devices 2'", timeout=60_000)
    page.get_by_label("Batch per rank").fill("320")
    page.wait_for_function("document.querySelector('.nbt-pick').textContent.includes('batches of 320')", timeout=60_000)
    line = page.evaluate(LINE)
    page.evaluate("window.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("!document.querySelector('.jp-mod-dirty')")
    page.reload()
    _picked(page)
    _line(page, line)

    # The cell below is another magic's: one comes between.
    page.get_by_role("button", name="Use in the next cell").click()
    page.wait_for_function(f"{SAID}.startsWith('The line is in a new cell below.')", timeout=60_000)
    assert [page.evaluate(SOURCE.format(cell)) for cell in (2, 3)] == [line, "%%bash\nls"]

    page.get_by_role("button", name="Measure 3").click()
    page.wait_for_function(
        "document.querySelector('.nbt-pick-compared').textContent.includes('running')", timeout=60_000
    )
    page.get_by_role("button", name="Stop", exact=True).click()
    page.wait_for_function(
        "document.querySelector('.nbt-pick-compared').textContent.includes('stopped')", timeout=60_000
    )
    page.wait_for_function("!document.querySelector('.nbt-pick-do button:disabled')", timeout=60_000)


@pytest.mark.limit(120)
def test_there_is_no_next_cell(notebook: Callable[..., Notebook]) -> None:
    book = notebook(SETUP, "%distributed pick -d 2")
    book.run(0)
    book.run(1)
    _picked(book.page)
    book.page.get_by_role("button", name="Use in the next cell").click()
    book.page.wait_for_function(f"{SAID}.startsWith('There is no next cell.')", timeout=60_000)


@pytest.fixture
def picker(browser: Any) -> Iterator[Open]:
    """`picker("dark")`: of a machine that never was. Nothing may be wrong in its console."""
    pages, wrong = [], []

    def open_one(asked: str = "", width: int = 1000) -> Page:
        page = browser.new_page(viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.goto(f"{base}/js/demo/picker.html?{asked}")
        page.wait_for_function("window.demo?.ready")
        return page

    with demonstration() as address:
        base = address.partition("/js/")[0]
        yield open_one
        for page in pages:
            page.close()
    assert not wrong


def test_memory_is_drawn_against_what_a_rank_may_use(picker: Open) -> None:
    page = picker()
    cards = page.locator(".nbt-pick-card")
    assert cards.locator(".nbt-pick-needs").all_inner_texts()[:4] == [
        "113 GB of 40 GB, 283 % · does not fit",
        "139 GB of 40 GB, 348 % · does not fit · sends 39 GB a step",
        "79 GB of 40 GB, 198 % · does not fit · sends 58 GB a step",
        "36.2 GB of 40 GB, 91 % · close · sends 58 GB a step",
    ]
    drawn = """card => {
        const bar = card.querySelector('.nbt-pick-bar').getBoundingClientRect();
        const part = node => node.getBoundingClientRect();
        const parts = [...card.querySelectorAll('.nbt-pick-bar i')].reduce((sum, node) => sum + part(node).width, 0);
        const limit = card.querySelector('.nbt-pick-bar b');
        return [parts / bar.width, limit.hidden ? null : (part(limit).left - bar.left) / bar.width]; }"""
    parts, limit = cards.nth(1).evaluate(drawn)
    assert (parts, limit) == (pytest.approx(1, abs=0.01), pytest.approx(40 / 139, abs=0.01))
    parts, limit = cards.nth(3).evaluate(drawn)
    assert (parts, limit) == (pytest.approx(36.2 / 40, abs=0.01), None)
    assert page.get_by_role("img", name="parameters 6.5 GB, gradients 6.5 GB").count() == 1


def test_four_cards_are_shown_and_more_on_request(picker: Open) -> None:
    page = picker()
    shown = page.locator(".nbt-pick-card:visible .nbt-pick-card-head label.nbt-code")
    assert shown.all_inner_texts() == ["single", "ddp", "zero1", "fsdp"]
    more = page.get_by_role("button", name="More strategies (2)")
    assert more.get_attribute("aria-expanded") == "false"
    more.focus()
    page.keyboard.press("Enter")
    assert shown.all_inner_texts() == ["single", "ddp", "zero1", "fsdp", "sharded", "xla"]
    page.get_by_role("button", name="Fewer strategies").click()
    page.evaluate("demo.model.say(demo.picked('sharded'))")
    assert shown.all_inner_texts() == ["single", "ddp", "zero1", "fsdp", "sharded"], "what is chosen is shown"
    # Arrows pass over what is not shown.
    page.get_by_role("radio", name="fsdp").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.labels[0].textContent") == "single"


def test_what_cannot_be_used_is_grey_and_says_why(picker: Open) -> None:
    page = picker()
    page.get_by_role("button", name="More strategies").click()
    card = page.locator(".nbt-pick-card.nbt-unusable")
    assert "pip install torch_xla" in card.inner_text()
    radio = page.get_by_role("radio", name="xla")
    assert radio.is_disabled()
    described = radio.get_attribute("aria-describedby")
    assert "pip install" in page.locator(f"#{described}").inner_text()
    card.click()
    assert page.evaluate("demo.model.sent.length") == 0


def test_everything_has_a_name_and_is_reached_by_the_keyboard(picker: Open) -> None:
    page = picker()
    nameless = """[...document.querySelectorAll('.nbt-pick :is(input, select, button)')].filter(
        node => !(node.labels?.length || node.textContent.trim() || node.ariaLabel)).map(node => node.outerHTML)"""
    assert page.evaluate(nameless) == []
    named = """[...document.querySelectorAll('fieldset, [role=radiogroup], [role=group]')].map(
        node => node.ariaLabel ?? node.querySelector('legend')?.textContent)"""
    assert page.evaluate(named) == ["Goal", "Acceptable slowdown", "strategies", "presets"]
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("document.activeElement.labels?.[0]?.textContent ?? document.activeElement.textContent")
        )
    fields = {"Ranks", "Precision", "largest model", "fsdp", "sharding", "cpu-offload"}
    assert fields | {"More strategies (2)", "Use in the next cell", "Measure 2"} <= reached


def test_what_is_typed_is_told_once_and_not_written_over(picker: Open) -> None:
    page = picker()
    page.get_by_label("wrap").press_sequentially("Block")
    page.wait_for_function("demo.model.sent.length === 1")
    sent = page.evaluate("demo.model.sent[0]")
    assert (sent["kind"], sent["name"], sent["value"]) == ("option", "wrap", "Block")
    page.get_by_label("wrap").press_sequentially(",He")
    page.evaluate("demo.model.say({ busy: 'plan' })")  # which answers the first
    assert page.get_by_label("wrap").input_value() == "Block,He"
    page.get_by_label("wrap").blur()
    page.wait_for_function("demo.model.sent.length === 2")
    assert page.evaluate("demo.model.sent[1].value") == "Block,He"
    page.get_by_label("Ranks").fill("0")
    page.get_by_label("Ranks").blur()
    assert page.evaluate("demo.model.sent.length") == 2, "no number of ranks"
    assert page.get_by_text("Ranks must be a number, 1 or more").is_visible()
    assert page.get_by_label("Ranks").get_attribute("aria-invalid") == "true"
    page.get_by_label("Ranks").fill("2")
    page.wait_for_function("demo.model.sent.length === 3")
    assert page.get_by_text("Ranks must be").count() == 0


def test_use_waits_for_what_was_typed_last(picker: Open) -> None:
    page = picker()
    page.get_by_label("cpu-offload").check()
    page.get_by_role("button", name="Use in the next cell").click()
    assert page.evaluate("demo.model.sent.map(one => one.kind)") == ["option"]
    page.evaluate("demo.model.say({ line: '%%distributed --strategy fsdp --devices 4 --cpu-offload' })")
    assert page.evaluate("demo.model.sent.map(one => [one.kind, one.written])") == [["option", None], ["use", ""]]
    page.get_by_label("cpu-offload").uncheck()
    page.wait_for_function(f"{SAID}.includes('kernel is busy')")  # nobody answers


@pytest.mark.parametrize("width", [1000, 420, 300])
def test_it_fits_into_narrow_pages_light_and_dark(picker: Open, width: int) -> None:
    for asked in ("", "dark"):
        page = picker(asked, width)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("document.querySelector('.nbt-pick').classList.contains('nbt-dark')") == bool(asked)


@pytest.mark.limit(300)
def test_verify_shows_a_receipt_and_leaves_the_notebook(notebook: Callable[..., Notebook]) -> None:
    before = SETUP + "\nbefore = [p.clone() for p in model.parameters()]"
    same = "print(all(map(torch.equal, before, model.parameters())), len(optimizer.state))"
    book = notebook(SETUP, f"%%distributed -d 2\n{LOOP}", before, "%distributed pick -d 2", same)
    page = book.page
    for cell in range(4):
        book.run(cell, timeout=120)
    _picked(page)
    page.get_by_role("button", name="Verify", exact=True).click()
    page.wait_for_selector(".nbt-pick-receipt[data-state=equal]", timeout=120_000)
    receipt = page.locator(".nbt-pick-receipt").text_content() or ""
    assert "ddp on 2 ranks against one process" in receipt
    assert "samples  320, each as often as in one process" in receipt
    assert "✓ equal: this strategy gives the same result as one process" in receipt
    assert "True 0" in book.run(4)[0]["text"]
    assert book.external == []
    assert not [said for said in book.console if said[0] == "pageerror"]
