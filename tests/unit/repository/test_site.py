"""`make site` makes one site of all pages, which asks nobody for anything; what leads nowhere is an error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT, name_of

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*(?:src|href)=[\"'](?:https?:)?//[^>]*>")


def site(source: Path, to: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "-c", str(ROOT / "docs")]
    command += ["-d", str(to / "cache"), str(source), str(to / "site")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    made = site(ROOT, folder)
    assert made.returncode == 0, made.stderr
    return folder / "site"


def test_it_has_every_page_and_fetches_nothing(whole: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in whole.rglob("*.html")}
    names = {path.relative_to(whole).as_posix() for path in pages}
    assert names >= {"index.html", *(name_of(page).replace(".md", ".html") for page in PAGES)}
    for path, text in pages.items():
        assert not FETCHED.search(text), path
    styles = "".join(path.read_text(encoding="utf-8") for path in whole.rglob("*.css"))
    assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles)


def test_its_pages_are_in_the_order_of_the_index(whole: Path) -> None:
    text = (whole / "index.html").read_text(encoding="utf-8")
    shown = re.findall(r'class="reference internal" href="([^"#]+)\.html"', text.partition('aria-label="Pages"')[2])
    told = re.findall(r"^- \[(\S+)\.md\]", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [name.removeprefix("../") if name.startswith("../") else f"docs/{name}" for name in told]
    assert [name for name in shown if name in wanted][: len(wanted)] == wanted
