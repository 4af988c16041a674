"""What the table of versions says is what nbtrain knows, and what pyproject.toml asks for."""

from __future__ import annotations

import re
from pathlib import Path

from nbtrain.compat import tested_versions as versions

ROOT = Path(__file__).resolve().parents[3]
TABLE = (ROOT / "docs" / "environments.md").read_text().split("## Which torch")[1].split("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("| 2.")]
ASKED = (ROOT / "pyproject.toml").read_text()


def test_every_torch_that_was_tried_has_a_row_and_passed() -> None:
    passed = {row[0].split(",")[0] for row in ROWS if row[-1].startswith("passed")}
    assert sorted(passed, key=versions.release) == list(versions.TRIED["torch"])


def test_every_row_says_when_and_how_it_ended() -> None:
    assert {len(row) for row in ROWS} == {6}
    for row in ROWS:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row[4]), row
        assert re.match(r"passed|`\w+` is refused", row[5]), row
        assert (row[2] in versions.TRIED["deepspeed"]) == row[5].startswith("passed"), row


def test_the_lowest_torch_is_the_lowest_that_was_tried() -> None:
    (lowest,) = re.findall(r'"torch>=([\d.]+)"', ASKED)
    assert versions.release(versions.oldest("torch"))[:2] == versions.release(lowest)


def test_deepspeed_has_both_bounds() -> None:
    (lowest, below) = re.findall(r'"deepspeed>=([\d.]+),<([\d.]+)"', ASKED)[0]
    assert lowest == versions.oldest("deepspeed")
    assert versions.release(versions.newest("deepspeed")) < versions.release(below)


def test_the_pinned_versions_are_among_those_that_were_tried() -> None:
    pins = dict(re.findall(r"^(\w+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for package, tried in versions.TRIED.items():
        assert pins[package] in tried
