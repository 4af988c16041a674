"""The house's own order: imports point down, there are no cycles, plug-ins never import each other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nbtrain.registry import STRATEGIES

ROOT = Path(__file__).resolve().parent.parent
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    return subprocess.run(command, cwd=directory, env=os.environ, capture_output=True, text=True, check=False)


def test_the_contract_knows_every_strategy_of_the_registry() -> None:
    kept = (ROOT / "pyproject.toml").read_text().split('id = "strategies"')[1].split("[[")[0]
    listed = set(re.findall(r'"(nbtrain\.strategies\.\w+)"', kept))
    assert listed == {entry.where.split(":")[0] for entry in STRATEGIES.values()}


def test_imports_keep_to_the_layers() -> None:
    told = lint(ROOT)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("errors.py", "def f():\n    from nbtrain.session import anything", "Imports point down BROKEN"),
        ("specs.py", "import torch", "Views and the server never load torch BROKEN"),
        ("exchange/one.py", "import IPython", "Exchange and training never import IPython BROKEN"),
        (
            "strategies/ddp/__init__.py",
            "from nbtrain.strategies import single",
            "Strategies never import each other BROKEN",
        ),
    ],
)
def test_the_contracts_catch_what_they_are_for(tmp_path: Path, file: str, line: str, broken: str) -> None:
    for original in (ROOT / "nbtrain").rglob("*.py"):
        copy = tmp_path / original.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text("")
    (tmp_path / "nbtrain" / file).write_text(line + "\n")
    told = lint(tmp_path)
    assert told.returncode != 0
    assert broken in told.stdout
