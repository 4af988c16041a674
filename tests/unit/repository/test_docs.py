"""What the documentation points at exists: tests by their names, files and headings by links, options and verbs."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest

import nbtrain
from nbtrain.annexes.planning.plan.guide import GOALS, GUIDE, LOSSES, RECOMPUTE
from nbtrain.annexes.planning.plan.plan_table import HEAD
from nbtrain.base.events import PHASES
from nbtrain.notebook.background.background_run import BackgroundRun
from nbtrain.notebook.magics.line.options import OPTIONS
from nbtrain.strategies.memory_estimate import World
from tests.support.pages import Block, blocks, name_of, outside_of_blocks
from tests.support.profiles import MB, SIZES, profile

ROOT = Path(__file__).resolve().parents[3]
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "README.md"
REFERENCE = ROOT / "docs" / "reference.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
RULES = ROOT / "docs" / "namespace.md"
PROMISES = ROOT / "docs" / "reliability.md"
WATCH = ROOT / "docs" / "watch.md"
CHOOSING = ROOT / "docs" / "choosing.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb")])
MARKDOWN = [page for page in PAGES if page.suffix == ".md"]
LANGUAGES = {"python", "python elsewhere", "output", "sh", "text", "toml", "diff"}
NOT_PLAYED = 7
"""Cells that no test plays, because they need a GPU, or machines: fewer is better."""
PICTURE = re.compile(r"(?:srcset|src)=\"([^\"]+)\"")
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST = re.compile(r"`((?:\w+/)*test_\w+\.py::[^`]+)`")
LINE = re.compile(r"^\|.*\| `(\[.+\])` \|$", re.MULTILINE)
"""A row of the table of lines: its last column is a case of one test."""


def text_of(page: Path) -> str:
    if page.suffix != ".ipynb":
        return page.read_text(encoding="utf-8")
    return "\n\n".join(cell.source for cell in nbformat.read(page, 4).cells if cell.cell_type == "markdown")


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def slugs(page: Path) -> set[str]:
    """What GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def promised() -> list[str]:
    text = text_of(RULES) + text_of(PROMISES)
    found = TEST.findall(text) + [f"kernel/test_lines.py::test_line{case}" for case in LINE.findall(text)]
    return list(dict.fromkeys(found))


def cases(files: set[str]) -> dict[str, set[str]]:
    """file::test → its cases in brackets, as pytest names them."""
    command = [
        sys.executable, "-m", "pytest", "--collect-only", "-q", "--color=no", "-p", "no:cacheprovider", "-p",
        "no:nbval",
    ]  # fmt: skip
    paths = [f"tests/{file}" for file in sorted(files)]
    whole = {name: value for name, value in os.environ.items() if name != "PART"}
    told = subprocess.run([*command, *paths], cwd=ROOT, env=whole, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    found: dict[str, set[str]] = defaultdict(set)
    for line in told.stdout.splitlines():
        name, bracket, case = line.removeprefix("tests/").partition("[")
        if "::" in name:
            found[name].add(bracket + case)
    return found


@pytest.mark.slow
def test_every_rule_names_tests_that_exist() -> None:
    names = promised()
    assert len(names) > 80
    there = cases({name.partition("::")[0] for name in names})
    for name in names:
        test, _, case = name.partition("[")
        assert test in there, name
        # a case of the table is run under each strategy: `[GAN-ddp]`, `[single-warm-SIGKILL]`
        wanted = case.removesuffix("]")
        assert not case or any(f"-{wanted}-" in f"-{one[1:-1]}-" for one in there[test]), name


def test_every_section_of_rules_has_its_tests() -> None:
    for page in (RULES, PROMISES):
        for section in re.split(r"^## ", text_of(page), flags=re.MULTILINE)[1:]:
            title = section.splitlines()[0]
            assert TEST.search(section) or LINE.search(section) or title == "What is not guaranteed", title


def leads_somewhere(page: Path, target: str) -> bool:
    """To a file and heading of the repository, here or where it is published. Other addresses count as alive."""
    published = re.search(r"github(?:\.com)?/nbtrain/nbtrain/(?:blob|tree)/main/(.+)", target)
    if published is None and re.match(r"[a-z]+:", target):
        return True
    folder, target = (ROOT, published[1]) if published else (page.parent, target)
    file, _, heading = target.partition("#")
    to = (folder / file).resolve() if file else page
    return to.exists() and (not heading or heading in slugs(to))


def dead_links(page: Path) -> list[str]:
    text = without_code(text_of(page))
    targets = [*LINK.findall(text), *PICTURE.findall(text)]
    return [target for target in targets if not leads_somewhere(page, target)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


@pytest.mark.parametrize("page", MARKDOWN, ids=name_of)
def test_blocks_say_what_they_are(page: Path) -> None:
    found = blocks(page)
    assert {block.language for block in found} <= LANGUAGES
    for above, block in pairwise([Block("", ""), *found]):
        assert block.language != "output" or above.is_cell, f"nothing shows this:\n{block.text}"
    indented = re.search(r"^\n {4,}(?![-*\d|]).*", outside_of_blocks(page), re.MULTILINE)
    assert indented is None, f"put it between fences:{indented and indented[0]}"


def test_few_cells_are_not_played() -> None:
    assert sum(block.language == "python elsewhere" for page in MARKDOWN for block in blocks(page)) <= NOT_PLAYED


def test_files_that_the_pages_on_the_house_name_are_there() -> None:
    """By their path in nbtrain/, in the repository, or by their name where the path stands before it."""
    files = [
        path.relative_to(ROOT).as_posix()
        for glob in ("*.py", "docs/*.py", "nbtrain/**/*.py", "tests/**/*.py")
        for path in ROOT.glob(glob)
    ]
    for page in (ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs/internals").glob("*.md"))):
        named = re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text())
        lost = [name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)]
        assert not lost, f"{page.name} names files that are not there: {lost}"


def test_files_that_docstrings_name_are_there() -> None:
    """And a room that lists its files lists all of them: so a newcomer finds the one that he looks for."""
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("nbtrain/**/*.py")]
    lost, unlisted = [], []
    for file in files:
        said = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
        named = re.findall(r"(?<![\w./{<-])((?:\w+/)*[a-z_]\w*\.py)\b", said)
        lost += [f"{file}: {name}" for name in named if not any(f"/{other}".endswith(f"/{name}") for other in files)]
        room = {path.stem for path in (ROOT / file).parent.glob("*.py")} - {"__init__", "__main__"}
        left_out = {name for name in room if not re.search(rf"\b{name}\b", said)}
        if file.endswith("__init__.py") and len(left_out) < len(room) / 2:
            unlisted += [f"{file}: {name}" for name in left_out]
    assert not [name for name in lost if not name.endswith(": train.py")]  # a user's
    assert not unlisted, "\n".join(unlisted)


def table_rows(text: str) -> list[list[str]]:
    r"""The cells of each row of a page's tables. In code a bar is written `\|`."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def test_the_reference_is_what_the_options_and_verbs_say_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ROOT / ".ci" / "reference"
    monkeypatch.setattr(sys, "argv", [str(script), "--check"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert runpy.run_path(str(script))["main"]() == 0, "make reference writes docs/reference.md anew"


def test_the_reference_has_every_option_once_and_no_other() -> None:
    tables = re.findall(r"^<!-- options .*?-->\n(.*?)^<!--", text_of(REFERENCE), re.MULTILINE | re.DOTALL)
    rows = [row for row in table_rows("".join(tables)) if row[0].startswith("`")]
    told = [flag for first, *_ in rows for flag in re.findall(r"--[a-z-]+", first)]
    assert sorted(told) == sorted(option.flag for option in OPTIONS)


def test_the_reference_has_every_name_of_a_rank() -> None:
    table = text_of(REFERENCE).partition("\n## Inside a cell\n")[2].partition("\n## ")[0]
    told = {name for first, *_ in table_rows(table) for name in re.findall(r"`(?:with )?(\w+)", first)}
    assert told == {*nbtrain.ON_A_RANK, "save", "load", "resumable", "whole"}


def test_the_readme_is_short() -> None:
    assert len(text_of(README).split()) <= 850


def test_the_readme_has_the_figures_that_were_measured() -> None:
    """Those of docs/performance.md, which `make bench PEERS=1` writes anew."""
    table = text_of(PERFORMANCE).partition("<!-- peers:")[2].partition("\n\nBold:")[0]
    marks = re.compile(r" ?<sup>\d+</sup>|\*\*|<br>.*")
    head, *measured = [[marks.sub("", cell) for cell in row] for row in table_rows(table)]
    at = [head.index(name) for name in ("nbtrain", "accelerate", "lightning", "ipyparallel")]
    figures = {name: [cells[column - 1] for column in at] for name, *cells in measured}
    rows = [row for row in table_rows(text_of(README)) if re.search(r"\d (?:ms|s|×|MB)$", row[1])]
    assert len(rows) == 3
    for name, *told in rows:
        (found,) = [cells for row, cells in figures.items() if name.endswith(row)]
        assert told == found, f"README.md: {name}"


def test_the_index_has_every_page_once_in_a_line() -> None:
    lines = [line for line in text_of(INDEX).splitlines() if line.startswith("- ")]
    assert all(re.fullmatch(r"- \[(\S+)\]\(\1\): .+", line) for line in lines)
    told = [(INDEX.parent / LINK.findall(line)[0]).resolve() for line in lines]
    pages = {page for page in PAGES if page.is_relative_to(INDEX.parent)} - {INDEX}
    assert sorted(told) == sorted(pages | {*ROOT.glob("*.md")} - {README})


def test_pictures_are_there_for_both_grounds_and_small() -> None:
    shown = {(page.parent / target).resolve() for page in PAGES for target in PICTURE.findall(text_of(page))}
    assert {path.name for path in shown} >= {"dashboard-light.png", "step-dark.png"}
    for path in shown:
        assert path.read_bytes().startswith(b"\x89PNG"), path
        assert path.stat().st_size <= 200_000, path
        other = {"light": "dark", "dark": "light"}[path.stem.rpartition("-")[2]]
        assert path.with_stem(f"{path.stem.rpartition('-')[0]}-{other}") in shown, path


def test_the_page_on_watching_has_every_part_of_a_step_as_the_dashboard_calls_it() -> None:
    names = dict(re.findall(r'^  (\w+): "(.+)",$', (ROOT / "js" / "src" / "phases.js").read_text(), re.MULTILINE))
    rows = re.findall(r"^\| ([\w ]+) \| `(\w+)` \|", text_of(WATCH), re.MULTILINE)
    assert [(name, phase) for phase, name in names.items()] == rows
    assert [phase for _, phase in rows] == list(PHASES)


def test_the_page_on_choosing_has_the_guide_as_it_is() -> None:
    told = {}
    for goal, row in re.findall(r"^\| the largest (\w+) \| (.+) \|$", text_of(CHOOSING), re.MULTILINE):
        for loss, cell in zip(LOSSES, row.split(" | "), strict=True):
            *ways, last = re.findall(r"`([^`]+)`", cell)
            told[goal, loss] = (tuple(ways), True) if last == RECOMPUTE else ((*ways, last), False)
    assert {goal for goal, _ in told} == set(GOALS) - {"speed"}
    assert told == {aim: (advice.ways, advice.recompute) for aim, advice in GUIDE.items()}


def test_the_page_on_choosing_explains_every_column_of_a_plan() -> None:
    rows = re.findall(r"^\| ([a-z, ?]+) \| .+ \|$", text_of(CHOOSING).partition("| column | |")[2], re.MULTILINE)
    told = {name for row in rows for name in row.split(", ")}
    assert told >= {*HEAD[1:], "communication", "fits?"}


def test_the_estimate_of_a_strategy_of_ones_own_is_right() -> None:
    classes = [
        one.text
        for one in blocks(ROOT / "docs" / "add_a_strategy.md")
        if "(nbtrain.Strategy)" in one.text or "(TopK)" in one.text
    ]
    made: dict[str, Any] = {"__name__": __name__}
    exec("".join(classes), made)
    model = profile(8 * MB, 4 * MB, 2 * MB, 1 * MB, 0)
    found = made["PlannedTopK"](made["TopK"].Options(fraction=0.1)).estimate(model, World(ranks=4))
    weights = sum(SIZES)
    assert (found.parameters, found.gradients, found.optimizer) == (weights, weights, 2 * weights)
    assert found.buffers == weights  # what waits
    assert found.kept == 5 * weights
    assert found.sent == pytest.approx(0.1 * weights / 4 * (4 + 8) * 3, rel=1e-6)  # a value and its place


def test_what_a_run_in_the_background_is_asked_is_there() -> None:
    asked = set(re.findall(r"\brun\.(\w+)", text_of(WATCH)))
    made = {"values", "error", "over"}
    assert asked >= {"steps", "metrics", "wait", "stop", "kill", "values", "error"}
    assert asked <= made | {name for name in vars(BackgroundRun) if not name.startswith("_")}
