"""The notebooks that a newcomer opens first run from top to bottom, and are committed without varying output."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.kernels import private_environment, private_home

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
STABLE = "nbval-check-output"
"""The tag of a cell whose committed output is compared with what it shows."""

UNCOUNTED = "[cells]\nregex: In\\[\\d+\\]\nreplace: In[N]\n"
"""nbval runs cells without counting them."""

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


@pytest.mark.kernel
@pytest.mark.slow
@pytest.mark.limit(300)
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    with private_home() as home:
        command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120"]
        command += [
            "-q",
            "--color=no",
            "-p",
            "no:cacheprovider",
            "-c",
            str(tmp_path / "none.ini"),
            f"--rootdir={path.parent}",
            f"--nbval-sanitize-with={tmp_path / 'same.ini'}",
        ]
        (tmp_path / "none.ini").write_text("[pytest]\n")
        (tmp_path / "same.ini").write_text(UNCOUNTED)
        told = subprocess.run(
            [*command, str(path)], cwd=home, env=private_environment(home), capture_output=True, text=True, check=False
        )
    assert told.returncode == 0, told.stdout + told.stderr


def test_is_committed_without_varying_output(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    kept = [cell.source for cell in cells if cell.outputs or cell.execution_count is not None]
    assert kept == [cell.source for cell in cells if STABLE in cell.metadata.get("tags", [])]
    assert set(book.metadata) == {"kernelspec", "language_info"}
    assert book.metadata.kernelspec.name == "python3"


def test_shows_how_it_is_meant_to_be_used(path: Path) -> None:
    sources = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert sources[0] == "%load_ext nbtrain"
    assert any(source.startswith("%%distributed ") for source in sources)
