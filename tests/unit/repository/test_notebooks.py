"""The notebooks are committed without varying output, and open on Colab and Kaggle."""

import re
from pathlib import Path

import nbformat
import pytest

from tests.support.kernels import ROOT
from tests.support.shells import bare_shell

HOME = re.findall(r'^Repository = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]

STABLE = "nbval-check-output"
"""The tag of a cell whose committed output is compared with what it shows."""

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

GALLERY = ROOT / "docs" / "gallery.md"

TIME = re.compile(r"^It takes about (1 minute|\d+ seconds|\d+ minutes) on 2 cores\.", re.MULTILINE)

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


def test_is_committed_without_varying_output(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    kept = [cell.source for cell in cells if cell.outputs or cell.execution_count is not None]
    assert kept == [cell.source for cell in cells if STABLE in cell.metadata.get("tags", [])]
    assert set(book.metadata) == {"kernelspec", "language_info"}
    assert book.metadata.kernelspec.name == "python3"


def test_shows_how_it_is_meant_to_be_used(path: Path) -> None:
    sources = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert sources[0].splitlines()[-2:] == ["%load_ext nbtrain", "%distributed doctor"]
    assert any(source.startswith("%%distributed ") for source in sources)


def test_says_first_how_long_it_takes(path: Path) -> None:
    assert TIME.search(nbformat.read(path, as_version=4).cells[1].source)


def test_is_in_the_gallery_with_its_title_its_time_and_a_small_picture(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[1].source
    heading = f"## [{first.splitlines()[0].removeprefix('# ')}](../notebooks/{path.name})\n"
    (section,) = [one for one in re.split(r"^(?=## )", GALLERY.read_text(), flags=re.MULTILINE) if heading in one]
    assert re.findall(r"About (\d+ \w+)\.", section) == TIME.findall(first)
    (picture,) = re.findall(r"^!\[.+\]\((.+)\)$", section, re.MULTILINE)
    assert picture == f"pictures/gallery/{path.stem}-light.png"
    assert (GALLERY.parent / picture).stat().st_size <= 200_000


def test_opens_on_colab_and_kaggle_and_brings_nbtrain_along(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    page = f"{HOME}/blob/main/notebooks/{path.name}"
    there = page.replace("https://github.com/", "https://colab.research.google.com/github/")
    assert cells[0].source.split("](")[-1] == f"https://kaggle.com/kernels/welcome?src={page})"
    assert f"]({there})" in cells[0].source
    first = next(cell.source for cell in cells if cell.cell_type == "code")
    assert f"%pip install --quiet git+{HOME}\n" in first


def test_what_brings_nbtrain_is_not_run_where_it_is(path: Path) -> None:
    first = next(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
    found: dict[bool, list[str]] = {}
    for there in (True, False):
        with bare_shell() as shell:
            said = found[there] = []
            for name in ("pip", "load_ext", "distributed"):
                shell.register_magic_function(
                    lambda line, name=name, said=said: said.append(f"{name} {line}"), "line", name
                )
            shell.run_cell(first.replace('"nbtrain"', '"os"' if there else '"nowhere"'))
    assert found[True] == ["load_ext nbtrain", "distributed doctor"]
    assert [line.partition(" ")[0] for line in found[False]] == ["pip", "load_ext", "distributed"]
