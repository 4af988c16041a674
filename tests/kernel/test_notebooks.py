"""The notebooks that a newcomer opens first run from top to bottom."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kernels import ROOT, private_environment, private_home
from tests.support.libraries import OF_NOTEBOOKS, library

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

UNCOUNTED = "[cells]\nregex: In\\[\\d+\\]\nreplace: In[N]\n"
"""nbval runs cells without counting them."""

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])


@pytest.mark.thorough
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
        kept = {"NBTRAIN_HISTORY": str(home / "history")}
        if path.stem in OF_NOTEBOOKS:
            kept |= {"PYTHONPATH": library(OF_NOTEBOOKS[path.stem]), "HF_HUB_OFFLINE": "1"}
        told = subprocess.run(
            [*command, str(path)],
            cwd=home,
            env=private_environment(home) | kept,
            capture_output=True,
            text=True,
            check=False,
        )
    assert told.returncode == 0, told.stdout + told.stderr
